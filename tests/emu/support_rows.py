"""The rows of docs/reference/support.md, in its order: cases, and tests that there are besides."""

from __future__ import annotations

from dataclasses import dataclass

from tests.emu import support_cases, support_cases_gpu
from tests.emu.support_lib import CASES

assert support_cases.CASES is support_cases_gpu.CASES is CASES

ANSWERS = "tests/emu/test_intercept_answers.py"
CLIENTS = "tests/emu/test_other_clients.py"
FULL = "tests/emu/test_full_gpu.py"
NO_TEST = ("no test", "no test")


@dataclass(frozen=True)
class Row:
    """A case, or what `tests` show.

    `emulated`, `real`: the outcomes where no case says them, each with the engine native and with
    replay.
    """

    case: str = ""
    kind: str = ""
    emulated: tuple[str, str] = NO_TEST
    tests: tuple[str, ...] = ()
    real: tuple[str, str] = ("not run yet", "not run yet")


ROWS = (
    Row("small_allocations"),
    Row("large_allocations"),
    Row(
        kind="out of memory at the same point (a room earlier: [limits.md](../limits.md#silent))",
        emulated=("round-trips", "round-trips"),
        tests=(
            f"{ANSWERS}::test_memory_runs_out_where_it_does_without_the_library",
            f"{FULL}::test_a_full_gpu_is_dumped_and_restored",
        ),
        real=(
            "round-trips (H200, 2026-11-21: `tests/gpu/test_full_gpu.py`)",
            "round-trips (H100, 2026-11-25: the same file)",
        ),
    ),
    Row("queries", tests=("tests/emu/test_programs.py::test_kept_programs_are_answered_alike",)),
    Row("order_of_frees"),
    Row(
        "own_mappings",
        tests=(
            "tests/emu/test_checkpoint.py::test_a_job_and_its_copies_end_as_an_undisturbed_one",
            "tests/emu/test_intercept_own_memory.py::"
            "test_the_program_sees_what_it_would_see_without_the_library",
        ),
    ),
    Row("stream_ordered_memory"),
    Row("own_pools"),
    Row(
        "managed_memory",
        tests=(
            "tests/emu/test_managed.py::"
            "test_managed_memory_that_threads_write_all_the_time_goes_on_in_the_image",
        ),
    ),
    Row("managed_pools"),
    Row("managed_variables"),
    Row("managed_hints"),
    Row("host_memory"),
    Row("mapped_host_memory"),
    Row("module_globals"),
    Row("globals_and_gpus"),
    Row("device_heap"),
    Row("device_printf"),
    Row("textures"),
    Row("surfaces"),
    Row("explicit_graph"),
    Row("captured_graph"),
    Row("user_objects"),
    Row("graph_with_memory"),
    Row("conditional_graph"),
    Row("graph_for_the_device"),
    Row("graph_by_kernel"),
    Row(
        kind="a capture under way",
        emulated=("waited for until `--timeout`",) * 2,
        tests=("tests/emu/test_replay_cases.py::test_a_capture_makes_the_task_busy_until_it_ends",),
        real=("waited for (H100, 2026-11-25: the same test)",) * 2,
    ),
    Row("events"),
    Row("priorities"),
    Row("green_context"),
    Row("several_contexts"),
    Row("peer_access"),
    Row(
        kind="memory that another process has by a legacy IPC handle",
        emulated=("round-trips",) * 2,
        tests=(
            "tests/emu/test_checkpoint.py::test_a_job_and_its_copies_end_as_an_undisturbed_one",
        ),
        real=("not tried",) * 2,
    ),
    Row("handle_of_two_gpus"),
    Row("exported_handles"),
    Row("imported_handles"),
    Row("exported_pool"),
    Row("ipc_events"),
    Row("rdma_capable"),
    Row("nvml", tests=(f"{CLIENTS}::test_nvml_is_there_as_before_when_replay_has_ended_cuda",)),
    Row(
        "decoders",
        tests=(f"{CLIENTS}::test_another_client_of_the_driver_is_named_and_the_job_goes_on",),
    ),
    Row(
        kind="NCCL communicators whose ranks are all in the job",
        emulated=("saved",) * 2,
        tests=(
            "tests/emu/test_nccl_checkpoint.py::test_ranks_end_as_undisturbed_ones_after_two_dumps",
        ),
        real=("not tried",) * 2,
    ),
    Row(
        kind="the same, made anew by `--communicators rebuild`",
        emulated=("round-trips",) * 2,
        tests=(
            "tests/emu/test_nccl_rebuilt.py::"
            "test_ranks_with_new_communicators_end_as_undisturbed_ones",
            "tests/emu/test_nccl_rebuilt.py::test_ranks_use_new_communicators_in_opposite_orders",
        ),
        real=("not tried",) * 2,
    ),
    Row(
        kind="a GPU of the Multi-Process Service (MPS)",
        emulated=("refused (`a GPU of the Multi-Process Service (MPS)`)", "round-trips"),
        tests=(
            "tests/emu/test_shared_gpus.py::test_the_engine_native_is_refused_to_a_client",
            "tests/emu/test_shared_gpus.py::"
            "test_clients_of_one_service_come_back_with_it_and_without",
        ),
        real=(
            "refused (H200, 2026-11-28: the same file, a real service)",
            "round-trips (H200, 2026-11-28: the same file, a real service)",
        ),
    ),
    Row(
        kind="a part of a GPU (MIG)",
        emulated=("refused (`a part of a GPU (MIG)`)",) * 2,
        tests=("tests/emu/test_shared_gpus.py::test_a_job_on_a_part_of_a_gpu_is_refused",),
        real=NO_TEST,
    ),
    Row(
        kind="the same, with `run --untried mig`",
        emulated=("refused (`a part of a GPU (MIG)`)", "round-trips"),
        tests=(
            "tests/emu/test_shared_gpus.py::"
            "test_a_job_on_a_part_of_a_gpu_comes_back_on_it_or_on_another",
        ),
        real=NO_TEST,
    ),
)
