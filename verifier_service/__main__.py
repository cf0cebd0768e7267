"""`python -m verifier_service`: settings from SPECDEC_VERIFIER_... in the environment."""

import asyncio

from specdec.config import VerifierSettings
from verifier_service.main import serve

asyncio.run(serve(VerifierSettings.model_validate({})))
