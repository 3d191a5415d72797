"""Hugging Face's `from_pretrained` with one more argument: `quantization_config=TwoFourConfig()` (docs/huggingface.md).

Importing this module imports transformers and registers our config and quantizer under "twofour" there. transformers
has no entry point that would find them by itself, so `import twofour` has this module imported as soon as
transformers' registry of quantizers is (`twofour.registration`), and stays free of both.
"""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ImportError('twofour.integrations needs transformers, 4.57 or newer: pip install "twofour[hf]"')

from twofour.integrations.config import TwoFourConfig
from twofour.integrations.quantizer import TwoFourQuantizer

__all__ = ["TwoFourConfig", "TwoFourQuantizer"]
