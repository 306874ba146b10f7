"""Trees of processes: children that begin, end, are stopped, or use the GPU out of sight."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.trials.prelude import Gpu, Here, build, child, ended, libc, program, say, until


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@program("zombies that nobody has waited for")
def zombies(here: Here) -> None:
    gpu = Gpu()
    pids = [child(lambda n=n: n) for n in range(20)]
    killed = child(lambda: os.kill(os.getpid(), signal.SIGKILL))
    until(lambda: all(state(pid) == "Z" for pid in [*pids, killed]))
    say("step", gpu.step())
    here.ready()
    say(ended([*pids, killed]), gpu.step())


@program("process groups and sessions")
def groups(here: Here) -> None:
    gpu = Gpu()
    reader, writer = os.pipe()

    def group(prepare: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            prepare()
            os.write(writer, b"x")
            here.wait()

        return run

    def pair() -> int:
        os.setpgrp()
        return ended([child(group(lambda: None))])[0]

    pids = [child(group(os.setsid)), child(group(os.setpgrp)), child(pair)]
    for _ in pids:
        os.read(reader, 1)
    say("step", gpu.step())
    here.ready()
    say(ended(pids), gpu.step())


@program(
    "a daemon that has left its parent",
    "refused: Unsupported",
    why="it is no part of the job's tree any more",
)
def daemon(here: Here) -> None:
    gpu, done = Gpu(), here.folder / "done"
    reader, writer = os.pipe()

    def orphan() -> None:
        os.setsid()
        os.write(writer, b"x")
        here.wait()
        done.touch()

    say(ended([child(lambda: child(orphan) and 0)]), os.read(reader, 1), gpu.step())
    here.ready()
    say(until(done.exists), gpu.step())


@program(
    "a daemon of another session that a subreaper of the job has taken over",
    "refused: CriuUnsupported",
    why="CRIU makes a process only where a parent or the leader has its session",
)
def adopted_daemon(here: Here) -> None:
    gpu = Gpu()
    reader, writer = os.pipe()

    def orphan() -> int:
        os.write(writer, b"x")
        here.wait()
        return 9

    def leader() -> int:
        os.setsid()
        child(orphan)
        return 0

    def subreaper() -> int:
        libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        ended([child(leader)])
        os.write(writer, b"y")
        return os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1])

    pid = child(subreaper)
    while os.read(reader, 1) != b"y":
        pass
    say("step", gpu.step())
    here.ready()
    say(ended([pid]), gpu.step())


@program(
    "processes nested 20 deep",
)
def nested(here: Here) -> None:
    gpu = Gpu()
    reader, writer = os.pipe()

    def level(left: int) -> int:
        if left:
            return ended([child(lambda: level(left - 1))])[0] + 1
        os.write(writer, b"x")
        here.wait()
        return 0

    pid = child(lambda: level(20))
    os.read(reader, 1)
    say("step", gpu.step())
    here.ready()
    say("deep", ended([pid]), gpu.step())


@program("children that are to get a signal at their parent's end")
def parent_death_signals(here: Here) -> None:
    gpu, hold, made = Gpu(), threading.Event(), threading.Event()
    reader, writer = os.pipe()
    pids: list[int] = []

    def make(number: int) -> None:
        def run() -> int:
            libc.prctl(1, number, 0, 0, 0)
            os.write(writer, b"x")
            here.wait()
            kept = ctypes.c_int()
            libc.prctl(2, ctypes.byref(kept), 0, 0, 0)
            return 10 + kept.value

        pids.append(child(run))
        os.read(reader, 1)

    def of_a_thread() -> None:
        make(signal.SIGKILL), make(signal.SIGINT)
        made.set()
        hold.wait()

    make(signal.SIGTERM)
    thread = threading.Thread(target=of_a_thread)
    thread.start()
    made.wait()
    say("step", gpu.step())
    here.ready()
    say(ended(pids), gpu.step())
    hold.set()
    thread.join()


@program("a pipeline of the shell that waits for its input, and background jobs of a script")
def pipelines(here: Here) -> None:
    gpu = Gpu()
    pipeline = subprocess.Popen(
        "cat | tr a-z A-Z | cat", shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    script = subprocess.Popen(
        ["sh", "-c", f"while [ ! -e {here.go} ]; do sleep 0.02; done & wait; exit 7"]
    )
    say("step", gpu.step())
    here.ready()
    say(pipeline.communicate(b"words")[0], pipeline.returncode, script.wait(), gpu.step())


@program("`script` and `su --pty`, which run a program on a terminal of their own and watch it")
def on_a_terminal(here: Here) -> None:
    gpu, user = Gpu(), pwd.getpwuid(os.getuid()).pw_name
    asks = "echo up; read word; echo $word; exit 3"
    commands = [["script", "-qefc", asks, "/dev/null"], ["su", "--pty", "-c", asks, user]]
    runs = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for words in commands
        if shutil.which(words[0])
    ]
    say([run.stdout.readline() for run in runs if run.stdout], gpu.step())
    here.ready()
    # They tell the end of a child by its signal alone, and one that it goes on may hide that.
    say(until(lambda: all(is_quiet(run.pid) for run in runs)))
    said = [run.communicate(b"end\n")[0].split() for run in runs]
    say([words[-1] for words in said], [run.returncode for run in runs], gpu.step())


def is_quiet(pid: int) -> bool:
    """True if its children have gone on and wait, and it has heard of all signals of theirs."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = int(status.partition("\nShdPnd:\t")[2].split()[0], 16)
    below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return not pending & 1 << signal.SIGCHLD - 1 and set(map(state, map(int, below))) == {"S"}


WAITS = """
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
static void *polls(void *none) { return poll(0, 0, 6000) ? "poll ends early" : "poll"; }
static void *sleeps(void *none) {
    return nanosleep(&(struct timespec){6, 0}, 0) ? "nanosleep ends early" : "nanosleep";
}
int main(void) {
    void *(*bodies[])(void *) = {polls, sleeps}, *said;
    pthread_t threads[2];
    for (int n = 0; n < 2; ++n) pthread_create(&threads[n], 0, bodies[n], 0);
    usleep(100000);
    puts("up");
    fflush(stdout);
    for (int n = 0; n < 2; ++n) {
        pthread_join(threads[n], &said);
        puts(said);
    }
}
"""


@program(
    "calls of C with a time limit, `poll` and `nanosleep`, in a program that handles no signal"
)
def time_limits(here: Here) -> None:
    gpu = Gpu()
    run = subprocess.Popen([build(here, WAITS, "-pthread")], stdout=subprocess.PIPE)
    say(run.stdout.readline() if run.stdout else "", gpu.step())
    here.ready()
    say(run.communicate()[0], run.returncode, gpu.step())


@program("short programs all the time: `posix_spawn`, fork and exec, the shell")
def short_programs(here: Here) -> None:
    gpu, stop, bad = Gpu(), threading.Event(), []
    counts = [0] * 4
    ways: list[Callable[[], int]] = [
        lambda: subprocess.run(["true"]).returncode,
        lambda: ended([os.posix_spawn("/bin/true", ["true"], os.environ)])[0],
        lambda: os.waitstatus_to_exitcode(os.system("true; exit 3")) - 3,
        lambda: subprocess.run("echo a | grep -q a", shell=True).returncode,
    ]

    def loop(number: int) -> None:
        while not stop.is_set():
            code = ways[number]()
            if code:
                bad.append((number, code))
            counts[number] += 1

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    say("step", gpu.step())
    here.ready()
    before = list(counts)
    say(until(lambda: all(now > then + 3 for now, then in zip(counts, before, strict=True))))
    stop.set()
    for thread in threads:
        thread.join()
    say("bad", bad, gpu.step())


def short_gpu_program(here: Here) -> None:
    gpu = Gpu()
    say(*[gpu.step() for _ in range(8)][-1:])


def sweep(here: Here, pause: float) -> None:
    """Trials of a sweep that each use the GPU for a moment, some at a time."""
    gpu, stop, bad = Gpu(), threading.Event(), []
    results: list[str] = []

    def loop() -> None:
        while not stop.is_set():
            done = subprocess.run(here.other(short_gpu_program), capture_output=True, text=True)
            if done.returncode:
                bad.append((done.returncode, done.stderr[-300:]))
            results.append(done.stdout.strip())
            stop.wait(pause)

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: len(results) > 2, 60)
    say("step", gpu.step())
    here.ready()
    before = len(results)
    say("they go on", until(lambda: len(results) > before + 3, 60))
    stop.set()
    for thread in threads:
        thread.join()
    say("bad", bad, {*results}, gpu.step())


@program("a sweep: short GPU processes that begin and end all the time")
def sweep_at_full_speed(here: Here) -> None:
    sweep(here, 0)


@program("a sweep with pauses between its GPU processes")
def sweep_with_pauses(here: Here) -> None:
    sweep(here, 0.3)


def gpu_worker(here: Here) -> None:
    """Says a step, and another when it is told to by a line."""
    gpu = Gpu()
    for _ in range(2):
        say(gpu.step())
        sys.stdin.readline()


def worker(here: Here, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        here.other(gpu_worker), stdin=-1, stdout=-1, stderr=-1, text=True, **options
    )


def with_worker(here: Here, **options: object) -> None:
    gpu, other = Gpu(), worker(here, **options)
    say("worker", other.stdout.readline().strip(), gpu.step())
    here.ready()
    said, wrong = other.communicate("\n\n", 30)
    say("worker", said.strip(), wrong[-300:], other.returncode, gpu.step())


@program("a child with the GPU and its environment, as any")
def gpu_child(here: Here) -> None:
    with_worker(here)


def without_environment() -> dict[str, str]:
    """The environment that `env -i` leaves; without FlowGPU variables name the emulated driver."""
    bare = not os.environ.get("FLOWGPU_SOCKET")
    driver = [name for name in os.environ if bare and name.startswith(("FLOWGPU_", "LD_LIB"))]
    return {name: os.environ[name] for name in ["PATH", *driver]}


@program("a child with the GPU and an empty environment (`env -i`)")
def gpu_child_without_environment(here: Here) -> None:
    with_worker(here, env=without_environment())


PRELOADED = "int trial_preloaded(void) { return 42; }"


@program("a child with the GPU that preloads a library of its own")
def gpu_child_with_preload(here: Here) -> None:
    own = build(here, PRELOADED, "-shared", "-fPIC")
    with_worker(here, env=os.environ | {"LD_PRELOAD": str(own)})


@program("a preload of its own: it runs itself again with `LD_PRELOAD`")
def runs_itself_again(here: Here) -> None:
    if not hasattr(libc, "trial_preloaded"):
        own = build(here, PRELOADED, "-shared", "-fPIC")
        again = here.other(runs_itself_again)
        os.execve(sys.executable, again, os.environ | {"LD_PRELOAD": str(own)})
    gpu = Gpu()
    say("preloaded", libc.trial_preloaded(), gpu.step())
    here.ready()
    say("preloaded", libc.trial_preloaded(), gpu.step())


STATIC = """
#include <stdio.h>
#include <unistd.h>
int main(int c, char **v) {
    (void)c;
    puts("up"); fflush(stdout);
    while (access(v[1], F_OK)) usleep(5000);
    puts("end");
    return 5;
}
"""


def beside(here: Here, program_: Path | str) -> None:
    """A program that uses no GPU, beside one that does."""
    gpu = Gpu()
    other = subprocess.Popen([program_, str(here.go)], stdout=subprocess.PIPE)
    say(other.stdout.readline(), gpu.step())
    here.ready()
    say(other.communicate()[0], other.returncode, gpu.step())


@program("a child that is a static program")
def static_child(here: Here) -> None:
    beside(here, build(here, STATIC, "-static"))


@program("a child compiled with AddressSanitizer, which takes no preload before it")
def sanitized_child(here: Here) -> None:
    beside(here, build(here, STATIC, "-fsanitize=address"))


# Without a C library, of which most machines have none for 32 bits.
TINY32 = r"""
static int call(int n, int a, int b, int c) {
    int r;
    __asm__ volatile("int $0x80" : "=a"(r) : "a"(n), "b"(a), "c"(b), "d"(c) : "memory");
    return r;
}
__asm__(".globl _start\n_start: mov %esp, %eax\n push %eax\n call go\n");
void go(int *stack) {
    int go_file = stack[2], wait[2] = {0, 5000000};
    call(4, 1, (int)"up\n", 3);
    while (call(33, go_file, 0, 0)) call(162, (int)wait, 0, 0);
    call(4, 1, (int)"end\n", 4);
    call(1, 5, 0, 0);
}
"""


@program("a child of 32 bits")
def child_of_32_bits(here: Here) -> None:
    options = ("-m32", "-ffreestanding", "-nostdlib", "-static", "-fno-pie", "-no-pie")
    options += ("-fno-stack-protector",)
    beside(here, build(here, TINY32, *options))


@program("a child that is stopped (SIGSTOP), and goes on later")
def stopped_child(here: Here) -> None:
    gpu = Gpu()
    sleeper = subprocess.Popen(["sleep", "1000"])
    os.kill(sleeper.pid, signal.SIGSTOP)
    until(lambda: state(sleeper.pid) == "T")
    say("step", gpu.step())
    here.ready()
    say(state(sleeper.pid))
    os.kill(sleeper.pid, signal.SIGCONT)
    say(until(lambda: state(sleeper.pid) == "S"))
    sleeper.kill()
    say(sleeper.wait(), gpu.step())


@program(
    "a GPU child that a scheduler has stopped (SIGSTOP)",
    "refused: TaskStopped",
    why="a stopped task cannot let go of the GPU",
    options=("--timeout", "8"),
)
def stopped_task(here: Here) -> None:
    gpu, other = Gpu(), worker(here)
    say("worker", other.stdout.readline().strip(), gpu.step())
    os.kill(other.pid, signal.SIGSTOP)
    until(lambda: state(other.pid) == "T")
    here.ready()
    os.kill(other.pid, signal.SIGCONT)
    said, wrong = other.communicate("\n\n", 30)
    say("worker", said.strip(), wrong[-300:], other.returncode, gpu.step())


@program("a GPU child whose watchdog ends it once the time has jumped")
def watchdog(here: Here) -> None:
    """It says what an undisturbed run says, whether it was ended early or at the end."""
    gpu, other = Gpu(), worker(here)
    say("worker", other.stdout.readline().strip(), gpu.step())
    say("ready")
    last = time.monotonic()
    while not here.go.exists():
        time.sleep(0.001)
        now = time.monotonic()
        if now - last > 0.05:
            other.kill()
        last = now
    other.kill()
    say("worker", other.wait(), gpu.step())


def exits_soon(here: Here) -> None:
    gpu = Gpu()
    say(gpu.step())
    os._exit(3)


@program("a supervisor without a GPU that starts its GPU worker anew whenever it ends")
def restarting_supervisor(here: Here) -> None:
    codes = set()
    others = 0
    say("ready")
    while not here.go.exists() or others < 2:
        done = subprocess.run(here.other(exits_soon), capture_output=True, text=True)
        codes.add((done.returncode, done.stdout, done.stderr))
        others += 1
    say(codes)


THREADS = """
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <errno.h>
#include <time.h>
#include <unistd.h>
enum { N = 300 };
static pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER, robust, pi;
static pthread_cond_t c = PTHREAD_COND_INITIALIZER;
static pthread_rwlock_t rw = PTHREAD_RWLOCK_INITIALIZER;
static pthread_barrier_t bar;
static sem_t sem;
static int go, pipes[2];
static long sum;
static __thread long mine;
static void *work(void *p) {
    long n = (long)p;
    mine = n * 3;
    pthread_barrier_wait(&bar);
    switch (n % 6) {
    case 0:
        pthread_mutex_lock(&m);
        while (!go) pthread_cond_wait(&c, &m);
        pthread_mutex_unlock(&m);
        break;
    case 1: while (sem_wait(&sem)) {} break;
    case 2: { char b; while (read(pipes[0], &b, 1) != 1) {} break; }
    case 3: pthread_rwlock_rdlock(&rw); pthread_rwlock_unlock(&rw); break;
    case 4:
        pthread_mutex_lock(&m);
        while (!go) {
            struct timespec t;
            clock_gettime(CLOCK_REALTIME, &t);
            t.tv_sec += 1;
            pthread_cond_timedwait(&c, &m, &t);
        }
        pthread_mutex_unlock(&m);
        break;
    case 5: pthread_mutex_lock(&pi); pthread_mutex_unlock(&pi); break;
    }
    pthread_mutex_lock(&m);
    sum += mine;
    pthread_mutex_unlock(&m);
    return 0;
}
static void *dies(void *p) {
    pthread_mutex_lock(&robust);
    while (!go) usleep(5000);
    return p;
}
int main(int argc, char **argv) {
    pthread_mutexattr_t a, b;
    pthread_t t[N], d;
    pthread_attr_t small;
    (void)argc;
    pthread_mutexattr_init(&a);
    pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&robust, &a);
    pthread_mutexattr_init(&b);
    pthread_mutexattr_setprotocol(&b, PTHREAD_PRIO_INHERIT);
    pthread_mutex_init(&pi, &b);
    sem_init(&sem, 0, 0);
    if (pipe(pipes)) return 1;
    pthread_rwlock_wrlock(&rw);
    pthread_mutex_lock(&pi);
    pthread_barrier_init(&bar, 0, N + 1);
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 128 << 10);
    for (long i = 0; i < N; i++)
        if (pthread_create(&t[i], &small, work, (void *)i)) return 2;
    pthread_create(&d, 0, dies, 0);
    pthread_barrier_wait(&bar);
    puts("up");
    fflush(stdout);
    while (access(argv[1], F_OK)) usleep(5000);
    pthread_mutex_lock(&m);
    go = 1;
    pthread_cond_broadcast(&c);
    pthread_mutex_unlock(&m);
    for (int i = 0; i < N; i++) {
        sem_post(&sem);
        if (write(pipes[1], "x", 1) != 1) return 3;
    }
    pthread_rwlock_unlock(&rw);
    pthread_mutex_unlock(&pi);
    for (int i = 0; i < N; i++) pthread_join(t[i], 0);
    pthread_join(d, 0);
    printf("sum %ld robust %d\\n", sum, pthread_mutex_lock(&robust) == EOWNERDEAD);
    return 0;
}
"""


@program("300 threads of C in locks of every kind; robust and priority-inheriting ones")
def many_threads(here: Here) -> None:
    beside(here, build(here, THREADS, "-lpthread"))


def absent(name: str) -> Callable[[Here], None]:
    def body(here: Here) -> None:
        gpu = Gpu()
        say(f"no {name} here", gpu.step())
        here.ready()
        say("step", gpu.step())

    return body


JAVA = """
public class Host {
    public static void main(String[] a) throws Exception {
        java.util.List<byte[]> kept = new java.util.ArrayList<>();
        for (int i = 0; i < 50; i++) kept.add(new byte[100000]);
        System.out.println("up");
        while (!new java.io.File(a[0]).exists()) Thread.sleep(5);
        long sum = 0;
        for (byte[] one : kept) sum += one.length;
        System.out.println("end " + sum);
        System.exit(5);
    }
}
"""


@program(
    "a Java virtual machine beside a GPU program (where there is one)",
)
def java(here: Here) -> None:
    if shutil.which("java") is None:
        return absent("java")(here)
    source = here.folder.parent / "Host.java"
    if not source.exists():
        source.write_text(JAVA)
    script = here.folder / "java.sh"
    script.write_text(f"#!/bin/sh\nexec java -Xmx64m {source} $1\n")
    script.chmod(0o755)
    return beside(here, script)


NODE = """
const fs = require('fs'), kept = [];
for (let i = 0; i < 100; i++) kept.push(Buffer.alloc(10000, i));
console.log('up');
const timer = setInterval(() => {
    if (!fs.existsSync(process.argv[2])) return;
    clearInterval(timer);
    console.log('end', kept.reduce((sum, one) => sum + one[9], 0));
    process.exitCode = 5;
}, 5);
"""


@program("Node.js beside a GPU program (where there is one)")
def node(here: Here) -> None:
    if shutil.which("node") is None:
        return absent("node")(here)
    source, script = here.folder / "host.js", here.folder / "node.sh"
    source.write_text(NODE)
    script.write_text(f"#!/bin/sh\nexec node {source} $1\n")
    script.chmod(0o755)
    return beside(here, script)


@program("limits: a core of no size, a large stack, few processes' descriptors, locked memory")
def limits(here: Here) -> None:
    gpu = Gpu()
    names = ("CORE", "STACK", "NOFILE", "MEMLOCK", "NPROC", "CPU")
    unlimited = resource.RLIM_INFINITY
    wanted = {"CORE": (0, 0), "STACK": (16 << 20, unlimited), "NOFILE": (700, 900),
              "MEMLOCK": (1 << 20, 2 << 20)}  # fmt: skip
    for name, pair in wanted.items():
        with contextlib.suppress(ValueError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), pair)

    def shown() -> dict[str, tuple[int, int]]:
        return {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in names}

    before = shown()
    say("step", gpu.step())
    here.ready()
    say(shown() == before, {name: shown()[name] for name in wanted}, gpu.step())
