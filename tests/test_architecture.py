"""The house rules of docs/ARCHITECTURE.md that a machine can hold."""

from __future__ import annotations

import ast
import functools
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.thinned import ONE_IN

REPO = pathlib.Path(__file__).parents[1]
PACKAGES = ("jaxllm", "pallas_kernels")
SOURCES = [
    path
    for root in (*PACKAGES, "benchmarks", "examples", "tools", "server")
    for path in sorted((REPO / root).rglob("*.py"))
]
SHIPPED = [path for path in SOURCES if path.relative_to(REPO).parts[0] in PACKAGES]

MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150
MAX_PARAMETERS = 8
HARD_MAX_PARAMETERS = 10

# Functions with more than eight parameters, and why they are not split.
MANY_PARAMETERS: dict[str, str] = {
    "pallas_kernels/paged_extend/mosaic_gpu.py:extend_attention": (
        "seven arrays of a ragged batch, and tuning, interpret by keyword"
    ),
    "pallas_kernels/paged_extend/mosaic_gpu.py:plan": (
        "three arrays of the rows, and the sizes of a step by keyword"
    ),
    "pallas_kernels/latent_extend/mosaic_gpu.py:latent_extend": (
        "seven arrays of a ragged batch, and tuning, interpret by keyword"
    ),
    "pallas_kernels/latent_extend/mosaic_gpu.py:plan": (
        "four arrays of the rows, and the sizes of a step by keyword"
    ),
}

# Reading the process environment is for what starts a process.
# What a process was told, or which devices a check may see; and a limit that XLA reads there and
# tells nobody.
READS_ENVIRONMENT = {
    "jaxllm/cli/__init__.py",
    "jaxllm/cli/fit.py",
    "jaxllm/server/__main__.py",
    "jaxllm/engine/startup/host_memory.py",
}

JAX_FREE = (
    "jaxllm",
    "jaxllm.cli",
    "jaxllm.config",
    "jaxllm.sampling.options",
    "jaxllm.cache.pool",
    "jaxllm.cache.prefix",
    "jaxllm.engine.scheduling.request",
    "jaxllm.engine.scheduling.plan",
    "jaxllm.engine.scheduling.scheduler",
    "jaxllm.server.__main__",
    "jaxllm.server.app",
    "jaxllm.server.requests.bodies",
    "jaxllm.server.parsing.pipeline",
)


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(REPO).as_posix()


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def functions(path: pathlib.Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def imported(path: pathlib.Path) -> set[str]:
    """Every dotted name that a file imports, with `from a import b` as `a.b`."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def loaded_by(module: str, watched: tuple[str, ...]) -> list[str]:
    """Which of `watched` are loaded in a fresh interpreter after importing `module`."""
    code = f"""
import importlib, json, sys
importlib.import_module({module!r})
print(json.dumps([name for name in {watched!r} if name in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_import_contracts_hold():
    code = "from importlinter.cli import lint_imports_command as main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-logo", "--no-cache"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


@pytest.mark.parametrize("module", JAX_FREE)
def test_modules_that_plan_or_serve_http_load_no_jax(module):
    assert loaded_by(module, ("jax", "jaxlib", "flax", "torch")) == []


def test_the_front_door_loads_nothing_heavy():
    assert loaded_by("jaxllm", ("jax", "torch", "transformers", "numpy", "starlette", "flax")) == []


def test_an_engine_loads_no_kernels_and_no_tokenizers_before_it_needs_them():
    """Pallas' GPU back end takes a quarter of a second to import, transformers half a second."""
    heavy = ("jax.experimental.mosaic.gpu", "jax.experimental.pallas", "transformers")
    assert loaded_by("jaxllm.engine.load", heavy) == []


def test_every_public_name_resolves():
    import jaxllm

    for name in jaxllm.__all__:
        assert getattr(jaxllm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jaxllm.nothing


def test_no_module_imports_jax_internals_or_unsafe_serialisers():
    banned = re.compile(
        r"(jax\._src|jaxlib|torch|triton|jax_triton|pickle|cloudpickle|dill|shelve|marshal)(\.|$)"
    )
    found = [
        f"{name_of(path)}: {name}"
        for path in SOURCES
        for name in sorted(imported(path))
        if banned.match(name)
    ]
    # JAX has no public way to drop what `traces.forget` drops; without these caches it does nothing
    names = {name_of(path) for path in SOURCES if "jax._src" in path.read_text()}
    found += sorted(names - {"jaxllm/engine/runtime/compilation/traces.py"})
    assert found == []


def test_nothing_evaluates_text_as_code():
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("eval", "exec", "compile", "__import__")
    ]
    assert found == []


def test_only_the_command_line_reads_the_environment():
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in SHIPPED
        if name_of(path) not in READS_ENVIRONMENT
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    ]
    assert found == []


def test_no_module_has_a_name_that_says_nothing():
    nothing = re.compile(r"(utils?|common|helpers?|misc|experimental|.*_v\d|v\d)(\.py)?$")
    families = {*(REPO / "jaxllm/models").glob("deepseek_v?.py")}  # their makers named them
    assert [
        name_of(path)
        for path in SOURCES
        if any(nothing.match(part) for part in path.relative_to(REPO).parts)
        and path not in families
    ] == []


def test_every_room_says_what_it_is_for():
    rooms = {path.parent for path in SHIPPED} - {REPO / "jaxllm"}
    assert [
        str(room.relative_to(REPO))
        for room in sorted(rooms)
        if not any((place / "README.md").is_file() for place in (room, room.parent))
    ] == []


def test_no_function_is_longer_than_a_screen():
    found = {}
    for path in SOURCES:
        limit = (
            MAX_KERNEL_LINES
            if path.relative_to(REPO).parts[0] == "pallas_kernels"
            else MAX_FUNCTION_LINES
        )
        for node in functions(path):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > limit:
                found[f"{name_of(path)}:{node.name}"] = lines
    assert found == {}


def test_no_function_takes_more_parameters_than_a_reader_can_hold():
    found = {}
    for path in SOURCES:
        for node in functions(path):
            arguments = [
                a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            ]
            count = len([a for a in arguments if a not in ("self", "cls")])
            limit = (
                HARD_MAX_PARAMETERS
                if f"{name_of(path)}:{node.name}" in MANY_PARAMETERS
                else MAX_PARAMETERS
            )
            if count > limit:
                found[f"{name_of(path)}:{node.name}"] = count
    assert found == {}


def test_every_excuse_for_many_parameters_is_still_needed():
    counts = {
        f"{name_of(path)}:{node.name}": len(node.args.posonlyargs)
        + len(node.args.args)
        + len(node.args.kwonlyargs)
        for path in SOURCES
        for node in functions(path)
    }
    assert [name for name in MANY_PARAMETERS if counts.get(name, 0) <= MAX_PARAMETERS] == []


def test_no_module_level_name_is_a_mutable_global():
    """Upper-case tables are constants by agreement; anything else at module level must not be a
    list, dict or set."""
    found = []
    for path in SHIPPED:
        for node in tree_of(path).body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            mutable = isinstance(
                getattr(node, "value", None),
                (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp),
            )
            found += [
                f"{name_of(path)}: {t.id}"
                for t in targets
                if mutable and isinstance(t, ast.Name) and not t.id.lstrip("_").isupper()
            ]
    assert [name for name in found if not name.endswith(": __all__")] == []


def keys_that_families_read() -> set[str]:
    """The keys of config.json: what the sources of models/ read by name, or have a default for."""
    found = set()
    for path in sorted((REPO / "jaxllm/models").rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                read = node.args if name in ("get", "positive", "flag", "number") else []
            elif isinstance(node, ast.Subscript):
                read = [node.slice]
            elif isinstance(node, ast.Dict):
                read = node.keys
            else:
                continue
            found |= {key.value for key in read if isinstance(key, ast.Constant)}
    # An axis of weights has the name of a key, and tokenizer_config.json has one of the same name;
    # a word alone may be anything. Settings of a quantization_config are read by its scheme too
    schemes = {"config_groups", "num_bits", "quant_algo", "sparsity_config", "transform_config"}
    others = {"head_dim", "auto_map"} | schemes
    return {key for key in found if isinstance(key, str) and "_" in key} - others


def test_only_models_sees_the_keys_of_config_json():
    keys = keys_that_families_read()
    assert {"hidden_size", "num_hidden_layers", "rope_theta", "eos_token_id"} <= keys
    found = []
    for path in SHIPPED:
        if name_of(path).startswith(("jaxllm/models/", "jaxllm/gguf/")):  # gguf writes such a file
            continue
        for node in ast.walk(tree_of(path)):
            text = node.value if isinstance(node, ast.Constant) else None
            raw = isinstance(node, ast.Attribute) and ast.unparse(node).endswith("spec.config")
            if raw or (isinstance(text, str) and text in keys):
                found.append(f"{name_of(path)}:{node.lineno} {text}")
    assert found == []


def test_like_cases_are_thinned_of_tests_that_there_are():
    def is_there(group: str) -> bool:
        file, _, name = group.rpartition("::")
        path = REPO / "tests" / file
        return path.is_file() and name in {each.name for each in functions(path)}

    assert [group for group in ONE_IN if not is_there(group)] == []


def test_the_wheel_ships_both_packages_and_no_others():
    import tomllib

    find = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"][
        "find"
    ]
    assert {pattern.removesuffix(".*") for pattern in find["include"]} == set(PACKAGES)


def test_the_front_door_promises_what_it_knows():
    import jaxllm

    assert set(jaxllm.__all__) == {*jaxllm._HOME, "__version__"}
