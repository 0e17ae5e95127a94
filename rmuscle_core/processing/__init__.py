# SPDX-License-Identifier: Apache-2.0
"""Between observation and tensors: the steps a checkpoint defines, each with its inverse."""

from rmuscle_core.processing.checkpoint_files import write_processors
from rmuscle_core.processing.images import to_image
from rmuscle_core.processing.normalize import Normalizer, feature_statistics
from rmuscle_core.processing.processor import ModelInputs, Processor
from rmuscle_core.processing.prompt import prompt_ids, state_bins
from rmuscle_core.processing.tokenizer import ByteTokenizer

__all__ = ['ByteTokenizer', 'ModelInputs', 'Normalizer', 'Processor', 'feature_statistics', 'prompt_ids',
           'state_bins', 'to_image', 'write_processors']
