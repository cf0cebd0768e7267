import subprocess
import sys

ROLE = """
import gc
from specdec.role_main import run_role

async def role():
    print("served", gc.isenabled())

run_role(role())
print("ended", gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_a_role_that_has_ended_leaves_nothing_for_the_interpreter_to_search() -> None:
    result = subprocess.run([sys.executable, "-c", ROLE], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["served", "True", "ended", "False", "True"]
