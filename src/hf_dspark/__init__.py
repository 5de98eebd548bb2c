"""hf-dspark: DSpark speculative decoding for transformers.

Importing it installs one guarded hook (three methods of transformers' GenerationMixin) and does nothing else: no network, no GPU,
no file. `target.generate(..., assistant_model=draft)` then decodes with a [`DSparkDraftModel`]; other assistants are unaffected.
"""

from hf_dspark.generation.hook import install
from hf_dspark.generation.queue import Completion, generate_many
from hf_dspark.generation.report import GenerationReport, record_generation
from hf_dspark.modeling import DSparkConfig, DSparkDraftModel

__all__ = ["Completion", "DSparkConfig", "DSparkDraftModel", "GenerationReport", "generate_many", "record_generation"]

install()
