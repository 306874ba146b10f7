# FlowGPU. `make help` lists the targets.
#
# PYTHON           interpreter to set up with (default python3)
# SYSTEM_PACKAGES  1: use PYTHON and its packages as they are, no virtual environment, no network
# BUILD            build folder
# JOBS             parallel build jobs; half as many again run tests (4 at most)
# ROUNDS, SEED     how many rounds of the kill storm, and the number of the first
# GPUS, RANK_JOBS  numbers of ranks to measure, joined by commas, and the jobs: torch_fsdp:6.7b wants four GPUs
# COUNT            checkpoints of the soak, swaps of each round
# ENGINE           what the jobs of storm and soak are prepared for: native or replay
PYTHON ?= python3
SYSTEM_PACKAGES ?=
BUILD ?= build
JOBS ?= $(shell nproc)
PYTEST_ARGS ?=
ENGINE ?= native
BENCH_ARGS ?=
RANK_JOBS ?= gpt2_xl_ddp torch_fsdp:1.3b
# Where measurements write each row; bench/results has their summaries alone.
RAW = $(BUILD)/results
SUM_UP = $(PY) -m bench.summary

VENV := .venv
ifeq ($(SYSTEM_PACKAGES),)
  # After `make setup SYSTEM_PACKAGES=1` there is no environment, and later calls need not repeat it.
  ifneq ($(wildcard .tools/.system-python),)
    SYSTEM_PACKAGES := 1
    PYTHON := $(shell cat .tools/.system-python)
  endif
endif
ifeq ($(SYSTEM_PACKAGES),)
  PY := $(VENV)/bin/python
  CLANG_FORMAT := $(VENV)/bin/clang-format
  STAMP := $(VENV)/.setup
else
  VENV :=
  PY := $(PYTHON)
  CLANG_FORMAT := clang-format
  STAMP := .tools/.system-python
endif
SETUP_INPUTS := pyproject.toml $(addprefix tools/,setup.sh requirements.py fetch_criu.py apt_sources.py)
NATIVE := $(shell find native -name '*.cc' -o -name '*.cpp' -o -name '*.c' -o -name '*.h' 2>/dev/null)
SCRIPTS := $(shell find tools .ci contrib -name '*.sh' -o -path .ci/run)

# In several processes where that can be had, more than processors: tests wait a third of their time.
PYTEST = $(PY) -m pytest --timeout 600 $$($(PY) -c 'import xdist' 2> /dev/null && echo --dist loadfile --no-loadscope-reorder -n $$(( $(JOBS) * 3 / 2 )) --maxprocesses 4)
# Tests that start nothing.
PURE := $(addprefix tests/unit/test_,$(addsuffix .py,active bad_image chunk_plans cli_render coordinator_engine digests docs errors failures filling image_chunks image_pages memory minimum phases reliability))

.DEFAULT_GOAL := help
.PHONY: help setup setup-htcondor setup-kubernetes setup-podman setup-slurm setup-tensorflow build demo test test-condor test-cuts test-drawn test-emulator test-faults test-kubernetes test-measuring test-modimage test-nodes test-pages test-podman test-ranks test-series test-slurm test-trials test-wheel test-workloads test-stale test-all check test-tensorflow test-programs test-gpu support-gpu kernels kernels-gpu fault-matrix fault-matrix-gpu kill-storm kill-storm-gpu slurm-storm soak soak-gpu swaps swaps-gpu trials trials-gpu record-programs triton-kernels bench bench-emu bench-nodes bench-preempt bench-ranks bench-stall performance-doc docs lint generate check-generated print-python clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP) ## Prepare the machine: system programs, Python environment, CRIU

$(STAMP): $(SETUP_INPUTS)
	tools/setup.sh $(PYTHON) "$(VENV)"
	@mkdir -p $(@D)
	@echo $(PYTHON) > $@

setup-tensorflow: $(STAMP) ## Add TensorFlow to the environment (1.5 GB) for the tests that need it
	$(PY) tools/requirements.py tensorflow | \
	    xargs $(PY) -m pip install --quiet --no-cache-dir --disable-pip-version-check

setup-slurm: ## Install Slurm for its tests, where apt-get can; else they are skipped
	@command -v slurmctld > /dev/null || { [ $$(id -u) = 0 ] && apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	        slurmctld slurmd slurm-client munge > /dev/null; } || \
	    echo "Slurm could not be installed here: its tests are skipped" >&2

setup-htcondor: $(STAMP) ## Fetch HTCondor for its tests into .tools, where apt-get can; else they are skipped
	$(PY) tools/fetch_htcondor.py

setup-kubernetes: ## Build a kube-apiserver for its tests into .tools (10 minutes), where apt-get can
	tools/fetch_kubernetes.sh

setup-podman: ## Fetch podman for its tests into .tools, where apt-get can; else they are skipped
	tools/fetch_podman.sh

build: $(STAMP) ## Build the native libraries into build/
	@mkdir -p $(BUILD)
	@include=$$($(PY) tools/find_cuda.py) && \
	cmake -S . -B $(BUILD) -G Ninja -DFLOWGPU_CUDA_INCLUDE=$$include \
	    -DPython3_EXECUTABLE=$$(command -v $(PY)) $(CMAKE_ARGS) > $(BUILD)/configure.log || \
	    { cat $(BUILD)/configure.log; exit 1; }
	@cmake --build $(BUILD) --parallel $(JOBS)
	@# A job's commands wait for Python to load these; not every machine lets it keep what it compiled.
	@$(PY) -m compileall -q flowgpu coordinator workloads

demo: build ## Checkpoint and restore a training job on the GPU found, else on the emulated one
	$(PY) -m workloads.demo

test: build ## Run the unit tests and those on the emulated GPU, with the real CRIU
	@ctest --test-dir $(BUILD) --output-on-failure --no-tests=ignore --timeout 900 --parallel $(JOBS)
	@# The longest files first: none is left to one of the processes at the end.
	$(PYTEST) tests/emu tests/unit -m "not gpu" $$($(PY) tools/lanes.py ignore) $(PYTEST_ARGS)

# Lanes of tools/lanes.py: each notes that it has passed.
LANES := condor cuts drawn emulator faults kubernetes measuring modimage nodes pages podman ranks series slurm trials wheel workloads
test-condor: build setup-htcondor ## Run jobs under a real HTCondor: evicted, held, on a machine that fails
test-cuts: build ## Make a thousand cuts through ranks of NCCL
test-drawn: build ## Run the drawn programs that are kept, and some anew
test-emulator: build ## Run the tests of the emulated GPU by itself
test-faults: build ## Run a sample of faults and kills, and jobs on machines that lack something
test-kubernetes: build ## Take images of pods of a real kube-apiserver, after `make setup-kubernetes`
test-measuring: build ## Run the tests of what measures FlowGPU and draws its figures
test-modimage: build ## Run the tests of the reader of modules' images
test-nodes: build ## Dump and restore jobs of two nodes, whose leaders and agents are killed
test-pages: build ## Run the commands of README and tutorial
test-podman: build setup-podman ## Run jobs in containers of a real podman: stopped, dumped, restored
test-ranks: build ## Dump and restore jobs that share GPU memory, and of ranks of NCCL
test-series: build ## Take series of images, copy jobs before the pause, and go on from a store
test-slurm: build setup-slurm ## Run jobs under a real Slurm: preempted, out of time, on a node that is drained
test-trials: build ## Dump and restore the programs of the catalogue, and jobs whose processes come and go
test-wheel: build ## Build the wheel, install it into a new environment, and dump and restore a job
test-workloads: build ## Run the tests of the workloads by themselves
$(LANES:%=test-%):
	$(PYTEST) $$($(PY) tools/lanes.py files $(@:test-%=%)) -m "not gpu" $(PYTEST_ARGS)
	@# Tests that were skipped because Slurm, podman, HTCondor or Kubernetes is missing have not passed.
	@if [ $@ = test-slurm ] && ! command -v slurmctld > /dev/null; then \
	    echo "Slurm is not installed: the lane slurm was skipped" >&2; \
	elif [ $@ = test-podman ] && ! $(PY) -m tests.podman.machine; then \
	    echo "podman is not installed: the lane podman was skipped" >&2; \
	elif [ $@ = test-kubernetes ] && ! $(PY) -m tests.kubernetes.cluster; then \
	    echo "there is no kube-apiserver (make setup-kubernetes): the lane kubernetes was skipped" >&2; \
	elif [ $@ = test-condor ] && ! $(PY) -m tests.condor.pool; then \
	    echo "HTCondor is not there: the lane condor was skipped" >&2; \
	else $(PY) tools/lanes.py passed $(@:test-%=%); fi

test-stale: build ## Run the lanes of which something has changed since they passed
	@for lane in $$($(PY) tools/lanes.py stale); do $(MAKE) test-$$lane || exit 1; done

test-all: test $(LANES:%=test-%) test-programs ## Run all tests that need no GPU

check: lint check-generated ## Check style, types, generated files, and what needs no other process
	$(PYTEST) $(PURE)

test-tensorflow: build setup-tensorflow ## Run the tests that compare with TensorFlow's own allocator
	$(PY) -m pytest tests/unit/test_memstub_tensorflow.py $(PYTEST_ARGS)

test-programs: build ## Draw 20000 programs of driver calls, bare and behind the intercept library
	@mkdir -p $(RAW); rm -f $(RAW)/programs.json
	FLOWGPU_PROGRAMS=20000 FLOWGPU_PROGRAMS_OUT=$(RAW)/programs.json \
	  $(PY) -m pytest tests/emu/test_programs.py --timeout 7200 $(PYTEST_ARGS)
	$(SUM_UP) $(RAW)/programs.json && $(PY) -m tests.faults.page

test-gpu: build ## Run the tests that need a real GPU
	$(PY) -m pytest tests/gpu tests/emu -m gpu $(PYTEST_ARGS)

support-gpu: build ## Try every kind of memory and object of docs/reference/support.md on the real GPU
	@mkdir -p $(RAW)
	code=0; for engine in native replay; do \
	  $(PY) -m tests.gpu.support --engine $$engine --out $(RAW)/support-$$engine.json || code=$$?; \
	  $(SUM_UP) $(RAW)/support-$$engine.json || code=$$?; \
	done; $(PY) tools/supportlist.py && exit $$code

kernels: build ## Record how near kernels come to their references on the emulated GPU, in docs/reference/kernels.md
	@mkdir -p $(RAW)
	FLOWGPU_KERNELS_OUT=$(RAW)/kernels.json $(PY) -m pytest tests/emu/test_kernels.py -m "not gpu" $(PYTEST_ARGS)
	$(SUM_UP) $(RAW)/kernels.json && $(PY) tools/kernellist.py

kernels-gpu: build ## The same on the real GPU
	@mkdir -p $(RAW)
	FLOWGPU_KERNELS_OUT=$(RAW)/kernels-gpu.json $(PY) -m pytest tests/emu/test_kernels.py -m gpu $(PYTEST_ARGS)
	$(SUM_UP) $(RAW)/kernels-gpu.json && $(PY) tools/kernellist.py

# The same on either GPU.
LANE = $(if $(filter %-gpu,$@),nvidia,emulated)

fault-matrix: build ## Let every fault of fault.def fire in turn, with each engine, on the emulated GPU (minutes)
fault-matrix-gpu: build ## The same on the real GPU
fault-matrix fault-matrix-gpu:
	@mkdir -p $(RAW)
	@code=0; for engine in native replay; do \
	    $(PY) -m tests.faults.matrix --lane $(LANE) --engine $$engine \
	        --out $(RAW)/$(LANE)-faults-$$engine.json || code=1; \
	    $(SUM_UP) $(RAW)/$(LANE)-faults-$$engine.json || code=1; \
	done; $(PY) -m tests.faults.page && exit $$code

slurm-storm: build setup-slurm ## Preempt 20 jobs under a real Slurm at drawn moments, for two minutes
	$(PY) -m tests.slurm.storm --jobs $(or $(COUNT),20) --seed $(or $(SEED),0)

kill-storm: build ## kill -9 of processes at random moments, ROUNDS (1000) times, on the emulated GPU
kill-storm-gpu: build ## The same on the real GPU, ROUNDS (50) times
kill-storm-gpu: ROUNDS ?= 50
kill-storm kill-storm-gpu:
	@mkdir -p $(RAW)
	$(PY) -m tests.faults.storm --gpu $(LANE) --rounds $(or $(ROUNDS),1000) --seed $(or $(SEED),0) --engine $(ENGINE) \
	    --out $(RAW)/$(LANE)-storm-$(ENGINE).json; \
	code=$$?; $(SUM_UP) $(RAW)/$(LANE)-storm-$(ENGINE).json && $(PY) -m tests.faults.page && exit $$code

soak: build ## COUNT (500) checkpoints of one job on the emulated GPU: does anything grow?
soak-gpu: build ## The same on the real GPU
soak soak-gpu:
	@mkdir -p $(RAW)
	$(PY) -m tests.faults.soak --gpu $(LANE) --count $(or $(COUNT),500) --engine $(ENGINE) \
	    --out $(RAW)/$(LANE)-soak-$(ENGINE).json; \
	code=$$?; $(SUM_UP) $(RAW)/$(LANE)-soak-$(ENGINE).json && $(PY) -m tests.faults.page && exit $$code

swaps: build ## COUNT (100) swaps of two and of three jobs on the emulated GPU: do their lines stay?
swaps-gpu: build ## The same on the real GPU
swaps swaps-gpu:
	@mkdir -p $(RAW)
	$(PY) -m tests.faults.swaps --gpu $(LANE) --count $(or $(COUNT),100) --out $(RAW)/$(LANE)-swaps.json

trials: build ## Dump, restore twice and leave running what ordinary programs do, in docs/reference/programs.md
trials-gpu: build ## The same on the real GPU
trials trials-gpu:
	@mkdir -p $(RAW)
	@$(PY) -m tests.trials --lane $(LANE) --out $(RAW)/$(LANE)-trials.json; \
	code=$$?; $(SUM_UP) $(RAW)/$(LANE)-trials.json && $(PY) tools/programlist.py && exit $$code

record-programs: build ## Record what the driver of this machine answers to COUNT (200) programs drawn with SEED (1)
	$(PY) -m tests.emu.record_programs --seed $(or $(SEED),1) --count $(or $(COUNT),200) --seconds 600 \
	    tests/emu/recorded_$(or $(SEED),1).json

triton-kernels: $(STAMP) ## Compile the tests' Triton kernels anew, with Triton added to the environment (1.1 GB)
	$(PY) tools/requirements.py triton | \
	    xargs $(PY) -m pip install --quiet --no-cache-dir --disable-pip-version-check
	$(PY) tools/compile_triton.py

bench: build ## Measure on the GPU of this machine; a summary goes to bench/results
	$(PY) bench/bench.py $(BENCH_ARGS)
	$(PY) -m bench.performance

bench-ranks: build ## Measure RANK_JOBS, ranks of NCCL, on GPUS=1,2,... GPUs (default: 1 and all)
	@mkdir -p $(RAW)
	for engine in native replay; do for job in $(RANK_JOBS); do \
	  $(PY) -m bench.replicas --engine $$engine --job $$job $(if $(GPUS),--ranks $(GPUS)) --left-running any \
	    --out $(RAW)/replicas.json; $(SUM_UP) $(RAW)/replicas.json; done; done; $(PY) -m bench.performance

bench-nodes: build ## Measure ranks on two nodes, which are network namespaces of this machine (root)
	@mkdir -p $(RAW)
	for how in rebuild keep; do $(PY) -m bench.nodes --communicators $$how --out $(RAW)/nodes.json; \
	  $(SUM_UP) $(RAW)/nodes.json; done; $(PY) -m bench.performance

bench-stall: build ## Measure what checkpoints cost jobs that go on, and suspend, resume and swap (half an hour)
	@mkdir -p $(RAW)
	for job in gpt2 gpt2_xl; do \
	  $(PY) -m bench.stall --job $$job --out $(RAW)/stall.json && $(SUM_UP) $(RAW)/stall.json; done
	$(PY) -m bench.suspend --out $(RAW)/suspend.json && $(SUM_UP) $(RAW)/suspend.json && $(PY) -m bench.performance

bench-preempt: build setup-slurm ## Measure how soon a job that Slurm has preempted runs again (root)
	@mkdir -p $(RAW)
	$(PY) -m bench.preempt --out $(RAW)/preempt.json && $(SUM_UP) $(RAW)/preempt.json && $(PY) -m bench.performance

bench-emu: build ## Measure how fast the emulated GPU runs kernels
	@mkdir -p $(RAW)
	$(PY) -m bench.interpreter --out $(RAW)/interpreter.json && $(SUM_UP) $(RAW)/interpreter.json

performance-doc: $(STAMP) ## Make docs/performance.md from the results in bench/results
	$(PY) -m bench.performance

docs: $(STAMP) ## Build the pages as a site in build/site; a dead link fails
	$(PY) tools/requirements.py docs | \
	    xargs $(PY) -m pip install --quiet --no-cache-dir --disable-pip-version-check
	$(PY) tools/docs_pages.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

lint: $(STAMP) ## Check style and types of Python, C++ and shell
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(if $(NATIVE),$(CLANG_FORMAT) --dry-run -Werror $(NATIVE))
	$(PY) -m mypy --strict flowgpu coordinator
	@if command -v shellcheck > /dev/null; then shellcheck $(SCRIPTS); fi

generate: $(STAMP) ## Write every committed generated file anew
	@$(PY) tools/check_generated.py || true

check-generated: $(STAMP) ## Fail when a committed generated file is stale
	$(PY) tools/check_generated.py

print-python:
	@echo $(PY)

clean: ## Remove what the build made; keeps the environment and CRIU
	rm -rf $(BUILD) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
