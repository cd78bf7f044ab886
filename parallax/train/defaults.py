"""The default training configs: every key there is, with what it means."""

from __future__ import annotations

import dataclasses

import ml_collections

from parallax.train.optimizer import Optimizer


def _data() -> ml_collections.ConfigDict:
    data = ml_collections.ConfigDict()
    data.source = ("stdlib",)           # "stdlib", text folders and files, .jsonl, .npy and .npz token files
    data.glob = ""                      # which files of a folder, such as "*.py"; empty: all known kinds of text
    data.held_out = 0.02                # fraction of the documents that is evaluated on, never trained on
    data.limit = 0                      # at most this many documents; 0: all
    return data


def get_config() -> ml_collections.ConfigDict:
    """A locked config for training."""
    config = ml_collections.ConfigDict()
    config.task = "train"
    config.objective = "next_token"     # a key of parallax.train.objectives.OBJECTIVES
    config.model = ml_collections.ConfigDict(dict(      # fields of ModelConfig; a config file may add others
        vocab_size=0,                   # 0: the tokenizer's, or the target's
        hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=32, intermediate_size=352,
        max_positions=512))
    config.init = ""                    # start from this checkpoint's weights; its architecture replaces `model`
    config.target = ""                  # whose drafter this is: zoo name, folder, .gguf file or Hub id
    config.tokenizer = ""               # "bytes", "bpe:N" or a checkpoint's; empty: the target's or init's, or bytes
    config.data = _data()
    config.sequence_length = 256        # tokens per row
    config.batch_size = 16              # rows per update, over all devices
    config.accumulate = 1               # micro-batches that an update is computed in; divides batch_size
    config.steps = 1000                 # updates
    config.seed = 0                     # decides weights, order of the data and all noise
    config.optimizer = ml_collections.ConfigDict(
        {field.name: field.default for field in dataclasses.fields(Optimizer)})
    config.loss = ml_collections.ConfigDict(dict(       # of distillation
        name="forward_kl",              # a key of parallax.train.losses.LOSSES
        position_weight="uniform",      # a key of POSITION_WEIGHTS there
        decay=0.8,                      # the position weight's number
        depth=4,                        # draft length that the weights and the logged accepted lengths are for
        temperature=1.0))               # of both laws
    config.dtype = "auto"               # of the computation: float32, bfloat16, or bfloat16 except on CPU
    config.mesh = ml_collections.ConfigDict(dict(data=1, fsdp=1, tensor=1))     # devices per axis; -1: the rest
    config.log_every = 20               # steps between lines in metrics.jsonl and tensorboard
    config.eval_every = 200
    config.eval_batches = 16            # held-out batches per evaluation
    config.eval_prompts = 8             # held-out prompts that the target continues, for the simulated accepted length
    config.eval_prompt_length = 32      # their tokens
    config.eval_new_tokens = 64         # tokens that the target writes behind each
    config.checkpoint_every = 200
    config.keep = 2                     # latest checkpoints kept
    config.keep_every = 0               # also keep those whose step is a multiple of this; 0: none
    config.lock()                       # all that is in it too
    config.model.unlock()
    return config


def get_generate_config() -> ml_collections.ConfigDict:
    """A locked config for text that a target writes, to train its drafters on."""
    config = ml_collections.ConfigDict()
    config.task = "generate"
    config.target = ""                  # zoo name, folder, .gguf file or Hub id
    config.data = _data()               # where prompts are cut from
    config.prompt_ids = ()              # put in front of every prompt, such as a BOS token; if set, source may be empty
    config.prompt_length = 32           # tokens of each prompt that are cut from the data
    config.count = 1024                 # texts
    config.max_new_tokens = 128
    config.temperature = 1.0            # 0 is greedy
    config.top_k = 0                    # 0 keeps all
    config.top_p = 1.0                  # 1 keeps all
    config.batch_size = 32              # texts decoded together; changes nothing but the time
    config.shard = 256                  # texts per part file, which is what a stopped run goes on behind
    config.seed = 0
    return config.lock()
