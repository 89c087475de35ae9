# The usual tasks. Every target works from a clean clone: what is missing is installed first.
# Variables: PRESET (a configure preset of CMakePresets.json), JOBS, ARGS (passed to ctest),
# FUZZ_SECONDS (for each fuzz target), DEVICE (cpu or cuda, of quickstart; default: cuda where an
# H100 or H200 and a CUDA toolkit are found), PREFIX and DESTDIR (of install), ARCH (the processors
# that packages are compiled for, as TROUPE_ARCH in CMakeLists.txt).

PRESET ?= release
export JOBS ?= $(shell nproc)
ARGS ?=
PREFIX ?= /usr/local
comma := ,
ARCH ?= $(if $(filter x86_64,$(shell uname -m)),x86-64-v2$(comma)x86-64-v3$(comma)x86-64-v4)
# Packages are for GPUs, too, where they can be built for them.
nvcc = $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
package_options = -DTROUPE_ARCH=$(ARCH) -DTROUPE_CUDA=$(if $(nvcc),ON,OFF)
dependencies = build $(if $(filter cuda,$(PRESET)),cuda)
build_dir = $(if $(filter release,$(PRESET)),build,build-$(PRESET))

.DEFAULT_GOAL := help
.PHONY: help quickstart build install package deb wheel test gpu-test bench fuzz docs format lint clean

help:  ## Show this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo "  Add PRESET=debug, asan, ubsan, sanitize, tsan or cuda to build and test another preset."

quickstart:  ## Train a small model on this machine, from nothing, in minutes
	@bash scripts/install_dependencies.sh build quickstart
	@bash scripts/quickstart.sh

build:  ## Build the program: build/troupe
	@bash scripts/install_dependencies.sh $(dependencies)
	@bash scripts/build.sh $(PRESET) troupe

install:  ## Build, and install below PREFIX (/usr/local): program, models, man page, completions
	@bash scripts/install_dependencies.sh $(dependencies)
	@bash scripts/build.sh $(PRESET) troupe
	@cmake --install $(build_dir) --prefix "$(PREFIX)" | sed '/share\/troupe\/configs\//d'

package:  ## Build for other machines: a .deb and a .tar.gz in build-package/packages
	@bash scripts/install_dependencies.sh build package $(if $(nvcc),cuda)
	@bash scripts/build.sh package troupe $(package_options)
	@cd build-package && cpack $(if $(FORMAT),-G $(FORMAT))

deb:  ## Build the .deb alone
	@$(MAKE) --no-print-directory package FORMAT=DEB

wheel:  ## Build a Python wheel with the program in it: build-package/packages/*.whl
	@bash scripts/install_dependencies.sh build package $(if $(nvcc),cuda)
	@bash scripts/build.sh package troupe $(package_options)
	@bash scripts/make_wheel.sh

test:  ## Build everything, then run every test that needs no GPU
	@bash scripts/install_dependencies.sh $(dependencies) readers
	@bash scripts/build.sh $(PRESET) all
	@bash scripts/run_tests.sh $(PRESET) $(ARGS)

gpu-test:  ## Build with CUDA, then run the tests that need a GPU
	@bash scripts/install_dependencies.sh build cuda
	@bash scripts/build.sh cuda troupe,troupe_gpu_tests
	@bash scripts/run_tests.sh gpu $(ARGS)

bench:  ## Build and run the benchmarks
	@bash scripts/install_dependencies.sh $(dependencies)
	@bash scripts/build.sh $(PRESET) troupe_bench -DTROUPE_BENCH=ON
	@for benchmark in $(build_dir)/bench/*_bench; do "$$benchmark" || exit 1; done

fuzz:  ## Run every fuzz target for FUZZ_SECONDS (60)
	@bash scripts/install_dependencies.sh build fuzz
	@bash scripts/build.sh fuzz troupe_fuzz
	@bash fuzz/run.sh

docs:  ## Render the documentation as a site, with its links checked: build-docs/site
	@bash scripts/install_dependencies.sh docs
	@PYTHONPATH=build-dependencies/docs NO_MKDOCS_2_WARNING=1 \
	  python3 -m mkdocs build -f scripts/site/mkdocs.yml
	@echo "To read it: python3 -m http.server --directory build-docs/site"

format:  ## Format the sources in place
	@bash scripts/install_dependencies.sh lint
	@bash scripts/format.sh

lint:  ## Check format, structure, prose and clang-tidy (ARGS=--changed: only files changed since the last commit)
	@bash scripts/install_dependencies.sh build lint
	@bash scripts/lint.sh $(ARGS)

clean:  ## Remove every build folder
	@rm -rf build build-*
