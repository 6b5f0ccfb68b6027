"""Every notebook has its outputs committed, and runs from top to bottom. As a script: renews the outputs.

All of them share one kernel, one after the other, so that torch is imported once.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 1_000_000
# A fresh start for the next notebook, but for what has been imported.
CLEAN = """import matplotlib.pyplot as plt
plt.close("all")
%reset -f
%cd -q {folder}
%matplotlib inline"""


@contextmanager
def started_kernel(temporary: Path) -> Iterator[KernelManager]:
    """``temporary``: for the folders that the notebooks' reader may look at afterwards."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)})
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    with started_kernel(tmp_path_factory.mktemp("temporary")) as manager:
        yield manager


def executed(path: Path, kernel: KernelManager, folder: Path) -> Any:
    """The notebook with the outputs of this run; raises CellExecutionError for a cell that does."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(CLEAN.format(folder=folder)))
    NotebookClient(notebook, timeout=240, km=kernel).execute()
    del notebook.cells[0]
    said = [
        output.text for cell in notebook.cells for output in cell.get("outputs", ()) if output.get("name") == "stderr"
    ]
    assert not any("ipywidgets" in text for text in said), "a missing package that nothing needs"
    for number, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), start=1):
        cell.execution_count = number
        cell.metadata.pop("execution", None)
        # What libraries have to say is not the notebook's.
        cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr" and "[WARNING]" not in o.get("text", "")]
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
    return notebook


@pytest.mark.in_turn
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
@pytest.mark.more_but("first_run.ipynb")
@pytest.mark.thorough_but("01_rollout_to_gradient.ipynb")
def test_notebook_runs(path: Path, kernel: KernelManager, tmp_path: Path) -> None:
    executed(path, kernel, tmp_path)
    assert list(tmp_path.iterdir()) == [], "a notebook leaves nothing in the folder that it is opened in"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_outputs_are_committed(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)
    assert "/tmp/" not in path.read_text(), "a path of the machine that ran it"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary, started_kernel(Path(temporary)) as shared:
        scratch = Path(tempfile.mkdtemp(dir=temporary))
        for file in [Path(name).resolve() for name in sys.argv[1:]] or NOTEBOOKS:
            nbformat.write(executed(file, shared, scratch), file)
