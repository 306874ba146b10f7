// A 32-bit program without a C library, for machines that have none of that size.
// Usage: narrow FILE; says "narrow" a hundred times a second, and "narrow end" once FILE exists.
static int call(int number, int a, int b, int c) {
    int result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c) : "memory");
    return result;
}

enum { EXIT = 1, WRITE = 4, ACCESS = 33, NANOSLEEP = 162 };

static void say(const char* text, int length) {
    call(WRITE, 1, (int)text, length);
}

__attribute__((used)) void begin(int* stack) {
    struct {
        int seconds, nanoseconds;
    } pause = {0, 10000000};
    while (call(ACCESS, stack[2], 0, 0) != 0) {
        say("narrow\n", 7);
        call(NANOSLEEP, (int)&pause, 0, 0);
    }
    say("narrow end\n", 11);
    call(EXIT, 0, 0, 0);
}

__asm__(".globl _start\n_start: movl %esp, %eax\n pushl %eax\n call begin\n");
