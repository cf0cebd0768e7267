"""`python -m drafter_service`: settings from SPECDEC_DRAFTER_... in the environment."""

from drafter_service.main import serve
from specdec.config import DrafterSettings
from specdec.role_main import run_role

run_role(serve(DrafterSettings.model_validate({})))
