"""Train a small GPT, character by character, on the English that ships with Python, and let it write a few lines.

`pydoc_data.topics` holds the language reference that `help()` shows, some 460 kB of text. Three algorithms change how
the model trains: two of them the model itself, before the first batch, and one the batches. The loss is reported in
bits per character: log2 of the number of characters if the model knew nothing, 2 to 3 after this short training.
"""

from __future__ import annotations

import math
import pydoc_data.topics

import anyio
import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor, nn

from eventbus_engine import Callback
from eventbus_engine.logger import Logger
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.algorithms import FusedLayerNorm, GatedLinearUnits, SeqLengthWarmup

LENGTH = 64  # characters that the model sees at once
WIDTH, HEADS, BLOCKS = 64, 4, 2
STEPS, BATCH_SIZE = 400, 12


class Block(nn.Module):
    """Attention to the characters before, then a feed-forward network, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(N, length, WIDTH) to the same shape."""
        heads = self.attention(self.attention_norm(x)).unflatten(2, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        changed: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return changed


class GPT(nn.Module):
    """The logits of the next character, at every place of a text."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(N, length) to (N, characters, length), the classes where `cross_entropy` looks for them."""
        x = self.characters(input_ids) + self.places.weight[: input_ids.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.transpose(1, 2)


class Text:
    """The text as numbers, and as batches: `input_ids` (N, LENGTH), and `labels`, the same one character on."""

    def __init__(self) -> None:
        text = "\n".join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
        self.alphabet = sorted(set(text))
        number = {character: index for index, character in enumerate(self.alphabet)}
        numbers = torch.tensor([number[character] for character in text])
        pieces = numbers[: len(numbers) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        self.train, self.held_out = pieces[: -len(pieces) // 10], pieces[-len(pieces) // 10 :]

    def batches(self, steps: int) -> list[dict[str, Tensor]]:
        """So many batches of the training text, drawn from a generator of their own."""
        chosen = torch.randint(len(self.train), (steps, BATCH_SIZE), generator=torch.Generator().manual_seed(1))
        return [self.batch(self.train[rows]) for rows in chosen]

    def batch(self, pieces: Tensor) -> dict[str, Tensor]:
        """The model's arguments, and the targets."""
        return {"input_ids": pieces[:, :-1], "labels": pieces[:, 1:]}

    def read(self, numbers: Tensor) -> str:
        """As text again."""
        return "".join(self.alphabet[number] for number in numbers.tolist())


class Progress(Callback[State]):
    """Prints a line every hundred batches."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """The batch counts as done here."""
        batch = int(state.timestamp.batch)
        if state.loss is not None and batch % 100 == 0:
            length = state.batch_get_item("input_ids").shape[1]
            print(f"batch {batch}: {float(state.loss) / math.log(2):.2f} bits per character of {length} at a time")


@torch.no_grad()
def write(model: nn.Module, length: int, generator: torch.Generator) -> Tensor:
    """Let the model write so many characters, each drawn from what it predicts after those before."""
    text = torch.zeros(1, 1, dtype=torch.long)  # the first of the alphabet, the end of a line
    for _ in range(length):
        logits = model(text[:, -LENGTH:])[0, :, -1]
        drawn = torch.multinomial(torch.softmax(logits / 0.7, dim=0), 1, generator=generator)
        text = torch.cat([text, drawn.unsqueeze(0)], dim=1)
    return text[0, 1:]


def main() -> None:
    """Train, evaluate and write."""
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    torch.manual_seed(1)
    text = Text()
    model = GPT(len(text.alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    trainer = Trainer(
        model,
        text.batches(STEPS),
        [text.batch(text.held_out)],
        loss=F.cross_entropy,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=STEPS),
        step_schedulers_every_batch=True,
        max_duration=f"{STEPS}ba",
        algorithms=[GatedLinearUnits(), FusedLayerNorm(), SeqLengthWarmup(min_seq_length=8, max_seq_length=LENGTH)],
        callbacks=[Progress()],
        seed=1,
    )
    anyio.run(trainer.fit)

    bits = trainer.state.metrics["metrics/eval/loss"] / math.log(2)
    print(f"held out: {bits:.2f} bits per character; {math.log2(len(text.alphabet)):.2f} before it knew anything")
    print(text.read(write(trainer.state.model.eval(), 400, torch.Generator().manual_seed(1))))


if __name__ == "__main__":
    main()
