"""`python -m verifier_service`: settings from SPECDEC_VERIFIER_... in the environment."""

from specdec.config import VerifierSettings
from specdec.role_main import run_role
from verifier_service.main import serve

run_role(serve(VerifierSettings.model_validate({})))
