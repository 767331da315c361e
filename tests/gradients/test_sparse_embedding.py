"""An embedding's gradient touches the rows of the words in a batch, and training says the same either way."""

import pytest
import torch

import fedflat as ff
from fedflat.models.fasttext import FastText

VOCABULARY, LENGTH = 500, 12


def federation() -> ff.Federation:
    rng = torch.Generator().manual_seed(3)
    words = torch.randint(0, VOCABULARY, (60, LENGTH), generator=rng)
    words[:, 7:] = 0  # padding
    labels = torch.randint(0, 4, (60,), generator=rng)
    return ff.Federation([(words[i::4], labels[i::4]) for i in range(4)], classes=4, vocabulary=VOCABULARY)


def trained(method: str, sparse: bool, **local) -> torch.Tensor:
    torch.manual_seed(0)
    model = FastText(VOCABULARY, 4, width=8, sparse=sparse)
    sgd = ff.LocalSGD(lr=0.5, epochs=2, batch_size=4, **local)
    run = ff.train(federation(), model, method, local=sgd, participation=2, rounds=4, dtype=torch.float64)
    return run.server.w


@pytest.mark.parametrize("method", sorted(ff.METHODS))
def test_sparse_and_dense_gradients_train_alike(method):
    torch.testing.assert_close(trained(method, True), trained(method, False), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("local", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"clip_norm": 0.01}])
def test_also_with_an_optimiser_that_moves_every_row(local):
    torch.testing.assert_close(
        trained("fedavg", True, **local), trained("fedavg", False, **local), rtol=1e-12, atol=1e-14
    )


def test_rows_of_absent_words_do_not_move():
    torch.manual_seed(0)
    before = FastText(VOCABULARY, 4, width=8).embedding.weight.detach().double()
    after = trained("fedavg", True)[: VOCABULARY * 8].view(VOCABULARY, 8)
    seen = torch.zeros(VOCABULARY, dtype=torch.bool)
    seen[torch.cat([federation().client(i).inputs.reshape(-1) for i in range(4)])] = True
    assert after[~seen].equal(before[~seen])
    assert (after[seen] != before[seen]).any()
