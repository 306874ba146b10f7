"""Generate the intercept library's tables from cuda.h and native/intercept/api.def.

api.def holds one row a driver function: its name without version or stream suffix, its treatment
(with what the replay engine does about it, where it does anything), its effect on memory, and the
exported symbols with a handler of their own. Prototypes come from the cuda.h of the pinned
nvidia-cuda-runtime wheel. Written: native/intercept/generated/{api,replay,plain,often,effects}.inc,
exports.map beside them, and docs/reference/api-coverage.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "native/intercept/api.def"
GENERATED = ROOT / "native/intercept/generated"
COVERAGE = ROOT / "docs/reference/api-coverage.md"
TREATMENTS = {
    "FORWARD": "passed on as it is: asks, or changes only the calling thread",
    "GATE": "passed on through the gate: waits while a checkpoint is taken",
    "TRACK": "through the gate, and a handler keeps our tables true",
    "TRANSLATE": "through the gate, and a handler exchanges handles",
    "REFUSE": "passed on through the gate; once used, a checkpoint refuses by its name",
}
REPLAY = {
    "": "nothing to keep: asks, submits work, or is refused for every engine",
    "record": "recorded, or answered from the record",
    "refuse": "once used, a checkpoint by the replay engine refuses by its name",
    "lives": "while what it has made lives, a checkpoint by the replay engine refuses by its name",
    "ends": "ends what a function with `lives` has made",
}
REPLAY_KINDS = {
    "": "PASS",
    "record": "RECORD",
    "refuse": "UNSAVED",
    "lives": "LIVES",
    "ends": "ENDS",
}
EFFECTS = {
    "": "none",
    "none": "none, though its name or an argument speaks of one",
    "launch": "submits work of the program's: kernels or a graph",
    "writes(...)": "submits or makes a write: to what and how much, as arguments of the call",
    "frees(...)": "ends the memory at an address",
}
# What such an argument says of a write by itself, or as one of a list.
STRUCTURES = {
    "CUDA_MEMCPY2D_v1": "copy_2d_v1", "CUDA_MEMCPY2D": "copy_2d", "CUDA_MEMCPY3D_v1": "copy_3d_v1",
    "CUDA_MEMCPY3D": "copy_3d", "CUDA_MEMCPY3D_PEER": "copy_3d_peer", "CUarray": "array",
    "CUDA_MEMCPY3D_BATCH_OP": "copies_3d", "CUstreamBatchMemOpParams": "operations",
    "CUmemDecompressParams": "unknown",
}  # fmt: skip
EFFECT = re.compile(r"(none|launch|writes|frees)(?:\(([^)]*)\))?$")
TERM = re.compile(
    r"(?:(?P<name>[A-Za-z]\w*)(?:\*(?P<unit>\d+)|\[(?P<count>\w+)\])?|(?P<bytes>\d+))$"
)
NO_ARGUMENT = 255  # effects.h
# The name of a function, or of an argument, that may not be without a stated effect. What is added
# to a graph happens when the graph is launched.
SPEAKS = re.compile(
    r"cu(?!Graph\w)\w*(Memcpy|Memset|Launch|Free|Unmap|Discard|Decompress|BatchMemOp|WriteValue)"
    r"|cuGraphLaunch$"
)
SPEAKING_ARGUMENT = re.compile(r"\bCUDA_MEMCPY|[ *]dsts?(?![a-z])")
SUFFIX = re.compile(r"(_v\d+)?(_ptsz|_ptds)?$")
PROTOTYPE = re.compile(r"\bCUresult\s+(?:\w+\s+)*?(cu\w+)\s*\(([^;]*?)\)\s*;", re.DOTALL)
ARGUMENT = re.compile(r"(\w+)\s*(?:\[\w*\])?$")


@dataclass(frozen=True)
class Row:
    """One row of api.def."""

    family: str
    treatment: str
    replay: str
    handled: tuple[str, ...]
    effect: str = ""


# What programs call in every step, most of all first: their functions lie together, and their slots
# in as few lines of the cache as there can be (intercept/page.h). PyTorch asks for the state of the
# primary context four times a launch, by the linked symbol, and cudart for the device twelve times.
OFTEN = (
    *("cuLaunchKernel", "cuDevicePrimaryCtxGetState", "cuCtxGetDevice", "cuLaunchKernelEx"),
    *("cuMemcpyAsync", "cuStreamIsCapturing", "cuKernelGetAttribute", "cuDeviceGetAttribute"),
    *("cuMemsetD8Async", "cuStreamGetCaptureInfo", "cuEventRecord", "cuEventQuery"),
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuStreamWaitEvent", "cuStreamSynchronize"),
    *("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync", "cuMemsetD32Async"),
    *("cuGraphLaunch", "cuLaunchHostFunc", "cuMemAllocAsync", "cuMemFreeAsync"),
    *("cuEventSynchronize", "cuEventElapsedTime", "cuStreamQuery", "cuCtxSynchronize"),
    *("cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent", "cuCtxPopCurrent"),
    *("cuPointerGetAttribute", "cuPointerGetAttributes", "cuFuncGetAttribute"),
    *("cuKernelGetFunction", "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags"),
)


def family_of(symbol: str) -> str:
    """Return a symbol's name without version and stream suffix."""
    return SUFFIX.sub("", symbol)


def read_table(path: Path = TABLE) -> list[Row]:
    """Read api.def; ValueError names the row that is malformed."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fields = line.split("#")[0].split()
        if not fields:
            continue
        treatment, _, replay = fields[1].partition(":") if len(fields) > 1 else ("", "", "")
        if treatment not in TREATMENTS or replay not in REPLAY:
            raise ValueError(
                f"{path.name}:{number}: not 'name TREATMENT[:replay] [effect] [symbols]': {line}"
            )
        effect = fields.pop(2) if len(fields) > 2 and EFFECT.match(fields[2]) else ""
        rows.append(Row(fields[0], treatment, replay, tuple(fields[2:]), effect))
    return rows


def cuda_include() -> Path:
    """Return the include folder of the nvidia-cuda-runtime wheel."""
    spec = find_spec("nvidia")
    for base in spec.submodule_search_locations or [] if spec else []:
        folder = Path(base) / "cu13/include"
        if (folder / "cuda.h").exists():
            return folder
    raise SystemExit("cuda.h not found: install the wheel nvidia-cuda-runtime (make setup)")


def prototypes(include: Path) -> dict[str, str]:
    """Return exported symbol -> parameter list, as cuda.h declares them for the driver itself."""
    text = subprocess.run(
        ["cc", "-E", "-P", "-D__CUDA_API_VERSION_INTERNAL", f"-I{include}", "-x", "c", "-"],
        input="#include <cuda.h>\n", capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {m.group(1): " ".join(m.group(2).split()) for m in PROTOTYPE.finditer(text)}


def header_version(include: Path) -> str:
    """Return CUDA_VERSION of cuda.h as major.minor."""
    match = re.search(r"#define CUDA_VERSION (\d+)", (include / "cuda.h").read_text())
    assert match
    number = int(match.group(1))
    return f"{number // 1000}.{number % 1000 // 10}"


def argument_names(parameters: str) -> str:
    """Return 'a, b' for 'int a, char* b'."""
    if parameters == "void":
        return ""
    names = []
    for parameter in parameters.split(","):
        match = ARGUMENT.search(parameter.strip())
        assert match, parameter
        names.append(match.group(1))
    return ", ".join(names)


def _place(symbol: str) -> tuple[int, str]:
    """Where a symbol comes in the order of OFTEN; those of per-thread streams are rarely used."""
    family = family_of(symbol)
    known = family in OFTEN and not symbol.endswith(("_ptsz", "_ptds"))
    return OFTEN.index(family) if known else len(OFTEN), symbol


def speaks_of_memory(symbol: str, parameters: str) -> bool:
    """Return whether the row of a function has to state its effect."""
    if SPEAKS.match(symbol):
        return True
    return not symbol.startswith("cuGraph") and bool(SPEAKING_ARGUMENT.search(parameters))


def effect_of(effect: str, parameters: str) -> str | None:
    """Return 'does, form, unit, places of arguments' for a symbol, as effects.h has them.

    None: it has no effect. ValueError says what of the row does not fit the prototype.
    """
    match = EFFECT.match(effect)
    does, inner = (match.group(1), match.group(2)) if match else ("none", None)
    if does in ("none", "launch"):
        return None if does == "none" else "launches, none, 1"
    names = argument_names(parameters).split(", ")
    types = [re.sub(r"\bconst\b|\w+$|[* ]", "", part) for part in parameters.split(",")]
    terms = [TERM.match(term) for term in inner.split(",")] if inner else []

    def place(name: str) -> int:
        if name not in names:
            raise ValueError(f"has no argument {name}")
        return names.index(name)

    unit, places, count = 1, [], None
    for term in terms:
        if not term:
            raise ValueError(f"cannot be read: {effect}")
        places.append(NO_ARGUMENT if term["bytes"] else place(term["name"]))
        unit *= int(term["unit"] or term["bytes"] or 1)
        count = term["count"] or count
    structure = STRUCTURES.get(types[places[0]]) if places else None
    form = {1: structure, 2: "list" if count else "line", 4: "rows"}.get(len(places))
    if does == "frees":
        form = {1: "address", 2: "line"}.get(len(places))
    if form is None:
        raise ValueError(f"is of no known form: {effect}")
    places += [place(count)] if count else []
    return ", ".join([does, form, str(unit), *map(str, places)])


def emit(rows: list[Row], protos: dict[str, str]) -> dict[str, str]:
    """Return the texts of {api,replay,plain,often,effects}.inc and exports.map, by name.

    SystemExit names what does not fit between table and header.
    """
    table = {row.family: row for row in rows}
    problems = []
    if len(table) != len(rows):
        problems.append("a function has two rows")
    families = {family_of(s) for s in protos}
    problems += [f"no row for {f}" for f in sorted(families - set(table))]
    handled = {h for row in rows for h in row.handled}
    problems += [f"handled symbol {h} is in no header" for h in sorted(handled - set(protos))]
    effects = []
    for symbol in sorted((s for s in protos if family_of(s) in table), key=_place):
        row = table[family_of(symbol)]
        gated = row.treatment != "FORWARD"
        if gated and not row.effect and speaks_of_memory(symbol, protos[symbol]):
            problems.append(f"the effect of {row.family} is not stated")
        try:
            effect = effect_of(row.effect, protos[symbol])
        except ValueError as error:
            problems.append(f"the effect of {symbol} {error}")
            continue
        if effect and row.treatment in ("FORWARD", "REFUSE"):
            problems.append(f"{row.family} has an effect, and is never watched")
        effects += [f"FG_EFFECT({symbol}, {effect})"] if effect else []
    if problems:
        raise SystemExit("api.def: " + "; ".join(problems))
    api, replay = [], []
    for symbol in sorted(protos, key=_place):
        row = table[family_of(symbol)]
        kind = "GATE" if row.treatment in ("TRACK", "TRANSLATE") else row.treatment
        if symbol in row.handled:
            kind = "HANDLE"
        call = f"({symbol}, ({protos[symbol]}), ({argument_names(protos[symbol])}))"
        api.append(f"FG_{kind}{call}")
        replay.append(f"FG_{REPLAY_KINDS[row.replay]}{call}")
    plain = [
        f"FG_PLAIN({f}, {int(table[f].treatment == 'REFUSE')})"
        for f in sorted(set(table) - families)
    ]
    names = [*sorted(protos), *sorted(set(table) - families), "flowgpu_nvml_guard"]
    exports = ["{", "global:", *(f"    {n};" for n in names), "local:", "    *;", "};"]
    often = [f"FG_OFTEN({s})" for s in sorted(protos, key=_place) if _place(s)[0] < len(OFTEN)]
    texts = {"api.inc": api, "replay.inc": replay, "plain.inc": plain, "often.inc": often}
    texts["effects.inc"] = effects
    return {name: "\n".join(lines) for name, lines in (texts | {"exports.map": exports}).items()}


def coverage(rows: list[Row], protos: dict[str, str], version: str) -> str:
    """Return docs/reference/api-coverage.md."""
    families: dict[str, list[str]] = {}
    for symbol in protos:
        families.setdefault(family_of(symbol), []).append(symbol)
    lines = [
        "<!-- Generated by tools/gen_intercept.py from native/intercept/api.def. Do not edit. -->",
        "# Driver API coverage",
        "",
        f"{len(protos)} exported symbols of cuda.h {version} in {len(families)} functions, and "
        f"{len(rows) - len(families)} functions of other headers. What each treatment means:",
        "",
        "| treatment | functions | meaning |",
        "|---|---|---|",
    ]
    for name, meaning in TREATMENTS.items():
        count = sum(row.treatment == name for row in rows)
        lines.append(f"| {name} | {count} | {meaning} |")
    lines += ["", "| replay engine | functions | meaning |", "|---|---|---|"]
    for name, meaning in REPLAY.items():
        count = sum(row.replay == name for row in rows)
        lines.append(f"| {name or '-'} | {count} | {meaning} |")
    lines += ["", "| effect | meaning |", "|---|---|"]
    lines += [f"| {name or '-'} | {meaning} |" for name, meaning in EFFECTS.items()]
    lines += [
        "",
        "A function without a row (a newer driver's) is passed on and counted on the control page.",
        "",
        "| function | treatment | replay engine | effect | symbols with a handler |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{r.family}` | {r.treatment} | {r.replay} | {r.effect} | {', '.join(r.handled)} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write every generated file."""
    rows = read_table()
    include = cuda_include()
    protos = prototypes(include)
    version = header_version(include)
    mark = f"Generated by tools/gen_intercept.py from api.def and cuda.h {version}. Do not edit."
    GENERATED.mkdir(exist_ok=True)
    for name, text in emit(rows, protos).items():
        head = f"# {mark}" if name == "exports.map" else f"// {mark}\n// clang-format off"
        (GENERATED / name).write_text(f"{head}\n{text}\n")
    COVERAGE.write_text(coverage(rows, protos, version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
