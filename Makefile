# The two commands of a fresh machine are `make demo` and `make test`; each installs what it needs first.
PYTHON := .venv/bin/python
FAST := tests/test_layout.py tests/test_imports.py tests/test_semantics.py tests/files tests/server tests/fuse tests/csi tests/operator tests/charts tests/cli tests/runtime tests/manifests

.PHONY: demo test lint format test-mount test-cluster test-external examples benchmarks clean

demo:  ## trains on this machine while ranks, the mount's daemon and the whole run are killed
	@.ci/bootstrap demo
	@$(PYTHON) manifests/examples/digits/demo.py

test:  ## the gates and every test that needs neither root nor a cluster
	@.ci/bootstrap dev
	@$(MAKE) --no-print-directory lint
	$(PYTHON) -m pytest -q $(FAST)

lint:  ## formatting, lint, layers, types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/lint-imports --no-cache
	.venv/bin/mypy

format:
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

test-mount:  ## real mounts on /dev/fuse
	@.ci/bootstrap dev programs
	$(PYTHON) -m pytest -q tests/mount

test-cluster:  ## a real Kubernetes: the project's own on this machine, or the one of $$KUBECONFIG
	@.ci/bootstrap dev
	$(PYTHON) -m pytest -q tests/cluster

test-external:  ## suites from elsewhere: csi-sanity, stress-ng and fio on a mount, a real S3 server, Ray Data jobs that are killed, the databricks SDK in several versions
	@.ci/bootstrap dev programs
	$(PYTHON) -m pytest -q tests/external
	$(PYTHON) -m pytest -q tests/files/test_volume_contract.py --real-bucket

examples:  ## embeds the training code into manifests/examples/*/trainingjob.yaml
	@$(PYTHON) manifests/examples/embed_code.py

benchmarks:  ## ratios in one run, written to docs/BENCHMARKS.md
	@.ci/bootstrap dev
	$(PYTHON) benchmarks/run.py

clean:
	rm -rf .venv build dist demo-out
