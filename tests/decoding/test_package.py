"""The folder stands alone: numpy and the standard library, relative imports, and it works under another name."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trtspec.decoding

FOLDER = Path(trtspec.decoding.__file__).parent
MODULES = sorted(FOLDER.glob("*.py"))

PROGRAM = """
import json, sys
import numpy as np
from elsewhere.cycle import Request, generate
from elsewhere.draft_target import DraftModel, Target
from elsewhere.engine_call import EngineResult
from elsewhere.sampler import TokenSampler
from elsewhere.verify import verify

def engine(request):
    rows = np.eye(8, dtype=np.float32)
    if request.draft_tokens is not None:
        wanted = [request.input_ids[-1], *request.draft_tokens]
        return EngineResult(np.array(verify(rows[[(t + 1) % 8 for t in wanted]], request).tokens))
    sampler, last = TokenSampler(request), request.input_ids[-1]
    while not sampler.finished:
        last = sampler.next(rows[(last + 1) % 8])
        sampler.append(last)
    return EngineResult(np.array(sampler.tokens))

*_, last = generate(Request([0], 9, num_draft_tokens=3), DraftModel(engine), Target(engine))
print(json.dumps({
    "ids": last.generation.token_ids.tolist(),
    "length": last.generation.acceptance.length,
    "foreign": sorted(n for n in ("torch", "scipy", "yaml", "transformers", "trtspec") if n in sys.modules),
}))
"""


@pytest.mark.parametrize("module", MODULES, ids=[m.stem for m in MODULES])
def test_modules_import_numpy_the_standard_library_and_each_other(module):
    allowed = {"numpy", *sys.stdlib_module_names}
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1 or node.module.split(".")[0] in allowed
            assert node.level < 2


def test_a_copy_works_under_another_name_without_the_package(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "elsewhere")
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"ids": [1, 2, 3, 4, 5, 6, 7, 0, 1], "length": 3.0, "foreign": []}
