"""Models of the transformers library as jobs: random weights, no download, code unmodified.

Each function makes a job in the size of a published model, or, with ``small=True``, one of
a few thousand parameters for tests. They can be planned for by name:
``graphpipe plan benchmarks/library.py:llava --device h100-sxm --devices 8 --batch-size 64``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.synthetic import synthetic_job

Inputs = dict[str, Any]
Draw = Callable[[int, torch.Generator], Inputs]

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SMALL_VISION = {**SMALL, "image_size": 8, "patch_size": 4}
IMAGE = 3
"""Id of the token that stands for a piece of an image in the small models."""

IMAGES_FILL_THEIR_OWN_TOKENS = ("aten.masked_scatter.default",)
"""LLaVA and BLIP-2 write the image features over the image tokens of the whole batch in one go.
Every sample has as many image tokens as features, so each gets its own."""
EXPERTS_RETURN_EVERY_TOKEN = ("model.layers.*.mlp.experts",)
"""The experts sort the tokens of the whole batch; each comes back to its place."""


def _job(
    name: str,
    model: Callable[[], nn.Module],
    draw: Draw,
    *,
    batch_size: int,
    per_sample_ops: tuple[str, ...] = (),
) -> Job:
    """A job whose model returns its loss; the batch is drawn at random."""

    def batch(samples: int, generator: torch.Generator) -> Batch:
        return Batch((), draw(samples, generator))

    made = synthetic_job(name, model, batch, None, batch_size=batch_size)
    options: Mapping[str, Any] = {"per_sample_ops": per_sample_ops} if per_sample_ops else {}
    return replace(made, capture_options=options)


def _ids(samples: int, length: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    return torch.randint(4, vocabulary, (samples, length), generator=generator)


def _words(vocabulary: int, length: int, **fixed: Any) -> Draw:
    """Token ids that are their own labels."""

    def draw(samples: int, generator: torch.Generator) -> Inputs:
        tokens = _ids(samples, length, vocabulary, generator)
        return {"input_ids": tokens, "labels": tokens.clone(), **fixed}

    return draw


def gpt2(small: bool = False) -> Job:
    """GPT-2, 124M parameters, tied head."""
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 8}
    config = tf.GPT2Config(**(sizes if small else {}))
    draw = _words(config.vocab_size, 6 if small else 1024, use_cache=False)
    return _job("gpt2", lambda: tf.GPT2LMHeadModel(config), draw, batch_size=64)


def _llama_config(small: bool) -> Any:
    return tf.LlamaConfig(**SMALL, num_key_value_heads=1, vocab_size=50) if small else (
        tf.LlamaConfig()
    )  # fmt: skip


def llama(small: bool = False) -> Job:
    """Llama, 6.7B parameters, with an attention mask."""
    config = _llama_config(small)
    words = _words(config.vocab_size, 6 if small else 2048, use_cache=False)

    def draw(samples: int, generator: torch.Generator) -> Inputs:
        found = words(samples, generator)
        return {**found, "attention_mask": torch.ones_like(found["input_ids"])}

    return _job("llama", lambda: tf.LlamaForCausalLM(config), draw, batch_size=64)


class LowRank(nn.Module):
    """A frozen linear and a trained low-rank correction (LoRA; Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def lora(small: bool = False) -> Job:
    """The same Llama, frozen, with low-rank adapters of rank 8 on queries and values."""

    def build() -> nn.Module:
        model = tf.LlamaForCausalLM(_llama_config(small)).requires_grad_(False)
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj = LowRank(attention.q_proj, 8)
            attention.v_proj = LowRank(attention.v_proj, 8)
        return model

    return replace(llama(small), model=build, name="lora")


def mixtral(small: bool = False) -> Job:
    """Mixtral with 16 layers of 8 experts, 23.6B parameters."""
    sizes: dict[str, Any] = {"num_hidden_layers": 16}
    if small:
        sizes = {
            **SMALL, "num_key_value_heads": 1, "vocab_size": 50, "num_local_experts": 4,
            "num_experts_per_tok": 2,
        }  # fmt: skip
    config = tf.MixtralConfig(**sizes)
    return _job(
        "mixtral",
        lambda: tf.MixtralForCausalLM(config),
        _words(config.vocab_size, 6 if small else 1024, use_cache=False),
        batch_size=64,
        per_sample_ops=EXPERTS_RETURN_EVERY_TOKEN,
    )


def bert(small: bool = False) -> Job:
    """BERT base, 110M parameters, classifying sentences."""
    config = tf.BertConfig(**({**SMALL, "vocab_size": 50} if small else {}))

    def draw(samples: int, generator: torch.Generator) -> Inputs:
        return {
            "input_ids": _ids(samples, 6 if small else 512, config.vocab_size, generator),
            "labels": torch.randint(2, (samples,), generator=generator),
        }

    return _job("bert", lambda: tf.BertForSequenceClassification(config), draw, batch_size=128)


def t5(small: bool = False) -> Job:
    """T5 small, 60M parameters, encoder and decoder."""
    sizes = {"num_layers": 1, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2,
             "vocab_size": 50} if small else {}  # fmt: skip
    config = tf.T5Config(**sizes, decoder_start_token_id=0)
    draw = _words(config.vocab_size, 6 if small else 512, use_cache=False)
    return _job("t5", lambda: tf.T5ForConditionalGeneration(config), draw, batch_size=64)


def bart(small: bool = False) -> Job:
    """BART large, 406M parameters, encoder and decoder."""
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "encoder_ffn_dim": 32,
             "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
             "vocab_size": 50, "max_position_embeddings": 16} if small else {}  # fmt: skip
    config = tf.BartConfig(**sizes)
    draw = _words(config.vocab_size, 6 if small else 512, use_cache=False)
    return _job("bart", lambda: tf.BartForConditionalGeneration(config), draw, batch_size=64)


def vit(small: bool = False) -> Job:
    """ViT-B/16, 86M parameters."""
    config = tf.ViTConfig(**(SMALL_VISION if small else {}))

    def draw(samples: int, generator: torch.Generator) -> Inputs:
        side = config.image_size
        return {
            "pixel_values": torch.randn(samples, 3, side, side, generator=generator),
            "labels": torch.randint(2, (samples,), generator=generator),
        }

    return _job("vit", lambda: tf.ViTForImageClassification(config), draw, batch_size=256)


def _towers(name: str, config: Any, build: Callable[[Any], nn.Module]) -> Job:
    vision, text = config.vision_config, config.text_config

    def draw(samples: int, generator: torch.Generator) -> Inputs:
        side = vision.image_size
        length = min(text.max_position_embeddings, 64) - 2
        return {
            "input_ids": _ids(samples, length, text.vocab_size, generator),
            "pixel_values": torch.randn(samples, 3, side, side, generator=generator),
            "return_loss": True,
        }

    return _job(name, lambda: build(config), draw, batch_size=256)


_SMALL_TOWERS = {
    "text_config": {**SMALL, "vocab_size": 50, "max_position_embeddings": 8},
    "vision_config": SMALL_VISION,
}


def clip(small: bool = False) -> Job:
    """CLIP ViT-B/32, 151M parameters, in-batch contrastive loss."""
    return _towers("clip", tf.CLIPConfig(**(_SMALL_TOWERS if small else {})), tf.CLIPModel)


def siglip(small: bool = False) -> Job:
    """SigLIP base, 203M parameters, in-batch sigmoid loss."""
    config = tf.SiglipConfig(**(_SMALL_TOWERS if small else {}))
    return _towers("siglip", config, tf.SiglipModel)


def whisper(small: bool = False) -> Job:
    """Whisper medium, 764M parameters, speech encoder and text decoder."""
    layers, width, heads, hidden = (1, 16, 2, 32) if small else (24, 1024, 16, 4096)
    sizes = {"vocab_size": 50, "num_mel_bins": 4, "max_source_positions": 5,
             "max_target_positions": 8} if small else {}  # fmt: skip
    config = tf.WhisperConfig(
        d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=hidden,
        decoder_ffn_dim=hidden, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, **sizes,
    )  # fmt: skip

    def draw(samples: int, generator: torch.Generator) -> Inputs:
        frames = 2 * config.max_source_positions
        return {
            "input_features": torch.randn(
                samples, config.num_mel_bins, frames, generator=generator
            ),
            "labels": _ids(samples, 6 if small else 256, config.vocab_size, generator),
            "use_cache": False,
        }

    return _job("whisper", lambda: tf.WhisperForConditionalGeneration(config), draw, batch_size=64)


def wav2vec2(small: bool = False) -> Job:
    """Wav2Vec2 base, 95M parameters, classifying 4 s of speech."""
    sizes: dict[str, Any] = {}
    if small:
        sizes = {
            **SMALL, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 3),
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 8,
        }  # fmt: skip
    # Masked spans and dropped layers are drawn in Python, once per call of the whole batch.
    config = tf.Wav2Vec2Config(**sizes, apply_spec_augment=False, layerdrop=0.0)

    def draw(samples: int, generator: torch.Generator) -> Inputs:
        return {
            "input_values": torch.randn(samples, 200 if small else 64_000, generator=generator),
            "labels": torch.randint(2, (samples,), generator=generator),
        }

    return _job(
        "wav2vec2", lambda: tf.Wav2Vec2ForSequenceClassification(config), draw, batch_size=64
    )


def _with_images(
    samples: int, images: int, text: int, side: int, token: int, generator: torch.Generator
) -> Inputs:
    """``images`` image tokens, then ``text`` words; the words are the labels."""
    words = torch.randint(4, 50, (samples, text), generator=generator)
    tokens = torch.cat([torch.full((samples, images), token), words], dim=1)
    labels = torch.cat([torch.full((samples, images), -100), words], dim=1)
    pixels = torch.randn(samples, 3, side, side, generator=generator)
    return {"input_ids": tokens, "labels": labels, "pixel_values": pixels, "use_cache": False}


def llava(small: bool = False) -> Job:
    """LLaVA 1.5: CLIP ViT-L/14 at 336 pixels, frozen, projector, Llama of 6.7B parameters."""
    if small:
        vision, text, token = tf.CLIPVisionConfig(**SMALL_VISION), _llama_config(True), IMAGE
        config = tf.LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=token, vision_feature_layer=-1
        )
    else:
        config = tf.LlavaConfig()
        vision, token = config.vision_config, config.image_token_index
    images = (vision.image_size // vision.patch_size) ** 2

    def build() -> nn.Module:
        model = tf.LlavaForConditionalGeneration(config)
        model.model.vision_tower.requires_grad_(False)
        return model

    def draw(samples: int, generator: torch.Generator) -> Inputs:
        return _with_images(
            samples, images, 6 if small else 512, vision.image_size, token, generator
        )

    return _job("llava", build, draw, batch_size=64, per_sample_ops=IMAGES_FILL_THEIR_OWN_TOKENS)


def blip2(small: bool = False) -> Job:
    """BLIP-2: frozen ViT-g, Q-Former, OPT of 2.7B parameters."""
    if small:
        config = tf.Blip2Config(
            vision_config=SMALL_VISION,
            qformer_config={**SMALL, "encoder_hidden_size": 16, "vocab_size": 50},
            text_config=tf.OPTConfig(
                hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
                vocab_size=60, max_position_embeddings=32, word_embed_proj_dim=16,
            ).to_dict(),
            num_query_tokens=4,
            image_token_index=IMAGE,
        )  # fmt: skip
    else:
        text = tf.OPTConfig(
            hidden_size=2560, ffn_dim=10240, num_hidden_layers=32, num_attention_heads=32,
            vocab_size=50304, word_embed_proj_dim=2560,
        )  # fmt: skip
        config = tf.Blip2Config(text_config=text.to_dict(), image_token_index=50265)

    def build() -> nn.Module:
        model = tf.Blip2ForConditionalGeneration(config)
        model.vision_model.requires_grad_(False)
        return model

    def draw(samples: int, generator: torch.Generator) -> Inputs:
        side, token = config.vision_config.image_size, config.image_token_index
        count = config.num_query_tokens
        return _with_images(samples, count, 4 if small else 128, side, token, generator)

    return _job("blip2", build, draw, batch_size=64, per_sample_ops=IMAGES_FILL_THEIR_OWN_TOKENS)


LIBRARY: dict[str, Callable[..., Job]] = {
    make.__name__: make
    for make in (
        clip, siglip, blip2, llava, whisper, t5, bart, gpt2, llama, lora, mixtral, bert, vit,
        wav2vec2,
    )
}  # fmt: skip
"""Factories by name; ``small=True`` gives the version for tests."""
