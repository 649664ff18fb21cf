"""Layers are counted while a step runs, so that a long step is no hang."""

import torch

from nodeagent.engine.architecture.bert_shape import BertShape
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.kernels.layer_count import layers_computed
from nodeagent.engine.model.bert import Bert
from tests.unit.engine.test_graphs import prompts
from tests.unit.engine.tiny import SHAPE, RandomWeights, llama


def test_a_step_of_a_decoder_counts_each_layer() -> None:
    runner = ModelRunner(llama(1), 8, "cpu", torch.float32)
    before = layers_computed()
    runner.run(prompts(1, 8))
    assert layers_computed() - before == SHAPE.layers


def test_a_step_of_an_encoder_counts_each_layer() -> None:
    shape = BertShape(
        layers=3,
        hidden=16,
        intermediate=24,
        heads=4,
        vocabulary=50,
        positions=32,
        kinds=2,
        epsilon=1e-5,
    )
    encoder = Bert(shape, RandomWeights(1), "cpu", torch.float32)
    tokens = torch.ones(2, 5, dtype=torch.int64)
    before = layers_computed()
    encoder.run(tokens, torch.zeros_like(tokens), torch.tensor([5, 3]))
    assert layers_computed() - before == 3
