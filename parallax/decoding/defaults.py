"""The default decode config: what `python -m parallax.decode` runs where no flag and no config file says otherwise."""

from __future__ import annotations

import ml_collections
from ml_collections import config_dict

from parallax.decoding import METHODS, options_of


def get_config(method: str = "prompt_lookup") -> ml_collections.ConfigDict:
    """A locked config for `method`. `options` are the method's own, the rest is common to all.

    An unknown method is not refused here but where it is used, with a message that lists the known ones.
    """
    config = ml_collections.ConfigDict()
    config.model = "smollm2-135m"
    config.draft = ""                   # draft model of the method `draft_model`; empty: the zoo's own for the model
    config.method = method
    options = options_of(method) if method in METHODS else {}
    config.options = ml_collections.ConfigDict({name: config_dict.placeholder(str) if value is None else value
                                                for name, value in options.items()})       # None: a path, if any

    config.verifier = "follow"          # a name of VERIFIERS, perhaps with options: "typical(epsilon=0.1)"
    config.kernels = "auto"             # Pallas kernels on TPU and GPU; xla: none; pallas: on a CPU too, interpreted
    config.chat = False                 # wrap the prompt in the model's chat template
    config.system = ""                  # system message of the chat; empty: the template's own
    config.max_new_tokens = 256         # per prompt, end of text included
    config.batch_size = 1               # prompts decoded together
    config.stop = ()                    # strings that end a completion

    sampling(config)
    config.seed = 0                     # decides all noise, whatever the batch
    return config.lock()


def sampling(config: ml_collections.ConfigDict) -> None:
    """Sets the sampling settings to those that change nothing: greedy decoding, as the model has it."""
    config.temperature = 0.0            # 0 is greedy
    config.top_k = 0                    # 0 keeps all
    config.top_p = 1.0                  # 1 keeps all
    config.min_p = 0.0                  # 0 keeps all
    config.typical_p = 1.0              # 1 keeps all
    config.epsilon_cutoff = 0.0         # 0 keeps all
    config.eta_cutoff = 0.0             # 0 keeps all
    config.repetition_penalty = 1.0     # 1 is none
    config.presence_penalty = 0.0       # 0 is none
    config.frequency_penalty = 0.0      # 0 is none
    config.logit_bias = ""              # JSON: {"token id": what to add to its logit}
