"""`python -m drafter_service`: settings from SPECDEC_DRAFTER_... in the environment."""

import asyncio

from drafter_service.main import serve
from specdec.config import DrafterSettings

asyncio.run(serve(DrafterSettings.model_validate({})))
