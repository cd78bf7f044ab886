"""The default benchmark config: every registered method on the built-in editing prompt."""

from __future__ import annotations

import ml_collections

from parallax.decoding import METHODS
from parallax.decoding.defaults import sampling


def get_config() -> ml_collections.ConfigDict:
    """A locked config.

    `methods` holds names, texts `NAME:option=value:...` or dicts with `name`, and if wanted `options`, `verifier` and
    `label`; plain decoding always runs besides. Those that need a draft model are left out where there is none.
    Without `prompts` the built-in editing prompt is used, as a chat if the model has a template.
    """
    config = ml_collections.ConfigDict()
    config.model = "smollm2-135m"
    config.draft = ""                   # draft model of the methods that need one; empty: the zoo's own for the model
    config.methods = tuple(METHODS)
    config.kernels = "auto"             # Pallas kernels on TPU and GPU; xla: none; pallas: on a CPU too, interpreted
    config.prompts = ()                 # prompt files
    config.count = 20                   # prompts per file, evenly spread over it
    config.repeats = 3                  # times that everything is measured
    config.costs = True                 # measure the cost model too, once per model shape and method

    config.chat = False                 # wrap prompts in the model's chat template
    config.system = ""                  # system message of the chat; empty: the template's own
    config.max_new_tokens = 128         # per prompt, end of text included
    config.ignore_eos = False           # go on at end of text
    config.batch_size = 1               # prompts decoded together

    sampling(config)
    config.seed = 0                     # of the first repeat; each further one takes the next
    return config.lock()
