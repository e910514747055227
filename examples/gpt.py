"""Used by train_gpt.py and others: a byte-level GPT as a list of layers.

The network is the usual decoder: token and position embedding, pre-norm causal blocks, norm and head. The only special
part is :meth:`GPT.configure_pipeline`, which returns the layers in order, as :class:`LayerSpec`: each worker
builds only the layers of its own stage, the same weights on every grid. Shapes are (batch, sequence, width).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_recycle import LayerSpec, PipelineModule

VOCABULARY = 256
"""One token per byte."""


class Embedding(nn.Module):
    """Tokens (batch, sequence) to vectors (batch, sequence, width): token plus position, then dropout."""

    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return embedded


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and the positions before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} does not divide into heads={heads}; choose a multiple of the heads")
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        # (batch, sequence, 3 * width) -> three of (batch, heads, sequence, width / heads)
        query, key, value = (
            part.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed: Tensor = self.output(attended.transpose(1, 2).reshape(batch, sequence, width))
        return mixed


class Block(nn.Module):
    """Attention and a four times wider feed-forward network, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x


class Head(nn.Module):
    """Vectors (batch, sequence, width) to logits (batch, sequence, VOCABULARY)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(x))
        return logits


class GPT(PipelineModule):
    """Predicts the next byte at every position of (batch, sequence) tokens.

    Args:
        width: Size of the vectors between layers.
        blocks: Number of transformer blocks; with embedding and head there are ``blocks + 2`` layers.
        heads: Attention heads per block; divides ``width``.
        context: Longest sequence, in bytes.
        dropout: Probability of dropping an activation in training.
        learning_rate: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW, on matrices; vectors (biases, norms) do not decay.
    """

    def __init__(
        self,
        width: int = 128,
        blocks: int = 4,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.1,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width = width
        self.blocks = blocks
        self.heads = heads
        self.context = context
        self.dropout = dropout
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay

    def configure_pipeline(self) -> list[nn.Module | LayerSpec]:
        """The layers in order; the strategy cuts this list into stages."""
        return [
            LayerSpec(Embedding, self.width, self.context, self.dropout),
            *(LayerSpec(Block, self.width, self.heads, self.dropout) for _ in range(self.blocks)),
            LayerSpec(Head, self.width),
        ]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of logits (batch, sequence, VOCABULARY) and tokens (batch, sequence)."""
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the parameters of this worker's stage."""
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float = 0.7, seed: int = 0) -> bytes:
        """Continue ``prompt`` (at least one byte) by ``length`` sampled bytes; temperature 0 takes the likeliest."""
        if not prompt:
            raise ValueError("generate() needs a prompt of at least one byte")
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)])
        was_training = self.training
        self.eval()
        for _ in range(length):
            logits = self(tokens[:, -self.context :])[:, -1]
            if temperature == 0:
                following = logits.argmax(-1, keepdim=True)
            else:
                following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, following), dim=1)
        self.train(was_training)
        return bytes(tokens[0].tolist())
