"""A worker told its platform imports no tensor library before the device is opened."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from pathlib import Path
from trimaran.device_workers.boot import describe
from trimaran.ipc.configuration import WorkerConfiguration
configuration = WorkerConfiguration(
    rank=0, num_ranks=1, generation=1, core_address="", run_directory="/nonexistent", cache_directory=sys.argv[3],
    model=sys.argv[1], platform=sys.argv[2], num_threads=1,
)
described = describe(configuration, print)
assert described is not None
print([name for name in ("torch", "triton", "transformers") if name in sys.modules])
"""


@pytest.mark.parametrize("platform", ["cpu", "null"])
def test_no_tensor_library_before_open(platform: str, demo_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", CODE, str(demo_folder), platform, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"
