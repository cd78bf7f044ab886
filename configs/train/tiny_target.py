"""A target of one million parameters on the Python standard library: what `tiny-python` in the package was made with.

    python -m parallax.train --config tiny_target
    python -m parallax.decode --model runs/tiny_target/export --prompt "def main():"

Two CPU cores, 1500 updates of 4096 tokens: 12 minutes (8.3k tokens per second). Held out: 2.48 nats per token, 44 % of
the next tokens right. `:smoke` trains a smaller one for a few steps, in under a minute.
"""

from parallax.train import defaults


def get_config(variant: str = ""):
    config = defaults.get_config()
    config.tokenizer = "bpe:1024"
    config.model.update(hidden_size=128, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=32,
                        intermediate_size=352, max_positions=512)
    config.sequence_length = 256
    config.batch_size = 16
    config.steps = 1500
    config.optimizer.update(learning_rate=3e-3, warmup=100, schedule="cosine", final=0.05)
    if variant == "smoke":
        config.tokenizer = "bytes"
        config.model.update(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
                            intermediate_size=64)
        config.sequence_length, config.batch_size = 64, 8
        config.data.limit = 20
        config.steps, config.log_every, config.eval_every, config.checkpoint_every = 30, 5, 15, 10
        config.eval_batches = 2
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
