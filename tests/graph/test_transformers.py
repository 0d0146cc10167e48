"""Models of the transformers library, unmodified, with random weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphpipe.graph.capture import capture
from graphpipe.graph.signature import bind_inputs
from tests.graph.eager import assert_equals_eager, assert_rows_are_independent

tf = pytest.importorskip("transformers")

B = 4
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2}  # fmt: skip
VISION = {**SIZES, "image_size": 8, "patch_size": 4}
EXPERTS = ["model.layers.*.mlp.experts"]
FILL = ["aten.masked_scatter.default"]


def ids(length: int = 6, low: int = 4) -> torch.Tensor:
    return torch.randint(low, 50, (B, length))


def language(config: Any, kind: Any, **extra: Any) -> tuple[Any, dict[str, Any]]:
    tokens = ids()
    return kind(config), {"input_ids": tokens, "labels": tokens, **extra}


def gpt2() -> Any:
    config = tf.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8)
    return language(config, tf.GPT2LMHeadModel, use_cache=False)


def llama() -> Any:
    config = tf.LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=50)
    return language(
        config, tf.LlamaForCausalLM, use_cache=False, attention_mask=torch.ones(B, 6).long()
    )


def mixtral() -> Any:
    config = tf.MixtralConfig(
        **SIZES, num_key_value_heads=1, vocab_size=50, num_local_experts=4, num_experts_per_tok=2
    )
    return language(config, tf.MixtralForCausalLM, use_cache=False)


def bert() -> Any:
    model = tf.BertForSequenceClassification(tf.BertConfig(**SIZES, vocab_size=50))
    return model, {"input_ids": ids(), "labels": torch.randint(0, 2, (B,))}


def t5() -> Any:
    config = tf.T5Config(
        num_layers=1, d_model=16, d_kv=8, d_ff=32, num_heads=2, vocab_size=50,
        decoder_start_token_id=0,
    )  # fmt: skip
    return language(config, tf.T5ForConditionalGeneration, use_cache=False)


def bart() -> Any:
    config = tf.BartConfig(
        encoder_layers=1, decoder_layers=1, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=2, vocab_size=50,
        max_position_embeddings=16,
    )  # fmt: skip
    return language(config, tf.BartForConditionalGeneration, use_cache=False)


def vit() -> Any:
    model = tf.ViTForImageClassification(tf.ViTConfig(**VISION))
    return model, {"pixel_values": torch.randn(B, 3, 8, 8), "labels": torch.randint(0, 2, (B,))}


def two_towers(config: Any, model: Any) -> Any:
    text = {**SIZES, "vocab_size": 50, "max_position_embeddings": 8}
    made = model(config(text_config=text, vision_config=VISION))
    images = torch.randn(B, 3, 8, 8)
    return made, {"input_ids": ids(), "pixel_values": images, "return_loss": True}


def clip() -> Any:
    return two_towers(tf.CLIPConfig, tf.CLIPModel)


def siglip() -> Any:
    return two_towers(tf.SiglipConfig, tf.SiglipModel)


def whisper() -> Any:
    config = tf.WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=50,
        num_mel_bins=4, max_source_positions=5, max_target_positions=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = tf.WhisperForConditionalGeneration(config)
    return model, {"input_features": torch.randn(B, 4, 10), "labels": ids(), "use_cache": False}


def wav2vec2() -> Any:
    config = tf.Wav2Vec2Config(
        **SIZES, conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 3),
        num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
        apply_spec_augment=False, layerdrop=0.0, classifier_proj_size=8,
    )  # fmt: skip
    model = tf.Wav2Vec2ForSequenceClassification(config)
    return model, {"input_values": torch.randn(B, 200), "labels": torch.randint(0, 2, (B,))}


def llava() -> Any:
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**VISION),
        text_config=tf.LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=50),
        image_token_index=3,
        vision_feature_layer=-1,
    )
    model = tf.LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)
    tokens = ids(10)
    tokens[:, 2:6] = 3
    images = torch.randn(B, 3, 8, 8)
    return model, {
        "input_ids": tokens, "labels": tokens, "pixel_values": images, "use_cache": False
    }  # fmt: skip


def blip2() -> Any:
    config = tf.Blip2Config(
        vision_config=VISION,
        qformer_config={**SIZES, "encoder_hidden_size": 16, "vocab_size": 50},
        text_config=tf.OPTConfig(
            hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=60,
            max_position_embeddings=32, word_embed_proj_dim=16,
        ).to_dict(),
        num_query_tokens=4,
        image_token_index=3,
    )  # fmt: skip
    tokens = ids(8)
    tokens[:, :4] = 3
    images = torch.randn(B, 3, 8, 8)
    return tf.Blip2ForConditionalGeneration(config), {
        "use_cache": False,
        "input_ids": tokens, "labels": tokens, "pixel_values": images
    }  # fmt: skip


SLOW = [bart, bert, clip, blip2, llama, llava, mixtral, siglip, t5, vit, wav2vec2, whisper]
MODELS = [gpt2, *(pytest.param(make, marks=pytest.mark.long) for make in SLOW)]
DECLARED = {"mixtral": EXPERTS, "llava": FILL, "blip2": FILL}
COUPLED = ("clip", "siglip")


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_an_unmodified_model_equals_eager_and_only_contrastive_losses_are_coupled(
    make: Callable[[], Any],
) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    # Dropout draws its numbers in another order where attention is one op: compare without.
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        declared = DECLARED.get(make.__name__, ())
        graph = capture(model, (), inputs, per_sample_ops=declared)
    # Gradients of randomly initialised models reach 1e17 in places (BLIP-2): compare values.
    assert_equals_eager(graph, model, (), inputs, atol=1e-5)
    assert any(op.coupled for op in graph.ops) == (make.__name__ in COUPLED)
    expected = "coupled" if make.__name__ in COUPLED else "sum_count"
    assert {term.reduction for term in graph.loss_terms} == {expected}
    assert graph.program is not None
    tensors, batch = bind_inputs(graph, graph.program, (), inputs)
    assert assert_rows_are_independent(graph, tensors, batch) > 100
