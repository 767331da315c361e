"""A mechanism in one sitting: send only a twentieth of every update, and remember the rest.

Clients upload only the entries of their update that changed most. What they leave out is lost; or, better, they keep
it and add it to their next update. One class does both, and can be added to any method. Prints the accuracy of each
way. (What counts as sent is still whole vectors: only what is in them changes.) Takes about 10 seconds.

    python examples/own_mechanism.py
"""

import argparse

import torch

import fedflat as ff


class SparseUploads(ff.Mechanism):
    """`Δ_i ← top(Δ_i + r_i)`: the largest entries leave, the others stay as `r_i` until the next time."""

    share: float = ff.number(default=0.05, above=0, at_most=1)
    remember: bool = True

    def contract(self) -> ff.Contract:
        """One vector is kept by every client: checkpoints and engines take care of it."""
        return ff.Contract(client=("left_out",) if self.remember else ())

    def leave(self, local: ff.Local, upload: ff.Upload) -> None:
        """On the client, after everything else: what is in `upload.update` now goes to the server."""
        whole = upload.update + local.kept("left_out") if self.remember else upload.update
        top = whole.abs().topk(max(1, round(self.share * len(whole)))).indices
        upload.update = torch.zeros_like(whole).index_copy_(0, top, whole[top])
        if self.remember:
            local.state["left_out"] = whole - upload.update


def main(rounds: int) -> None:
    """FedSAM with full, sparse, and sparse but remembered uploads."""
    federation = ff.federate("digits", ff.Dirichlet(0.3), clients=20, seed=0)
    local = ff.LocalSGD(lr=0.05, epochs=2, batch_size=20)
    methods = {
        "everything": ff.fedsam(rho=0.1),
        "5 %, the rest lost": [ff.fedsam(rho=0.1), SparseUploads(0.05, remember=False)],
        "5 %, the rest kept": "fedsam(rho=0.1) + sparse-uploads(share=0.05)",  # in words, as on the command line
    }
    for name, method in methods.items():
        run = ff.train(federation, "mlp", method, local, participation=5, rounds=rounds)
        print(f"{name:18}  accuracy {run.accuracy:.1%}")

    # Sent whole, it must be FedSAM itself, bit for bit: the first thing to try with a mechanism.
    plain, whole = (
        ff.train(federation, "mlp", method, local, participation=5, rounds=3)
        for method in ("fedsam(rho=0.1)", "fedsam(rho=0.1) + sparse-uploads(share=1)")
    )
    print("share=1 is FedSAM:", torch.equal(plain.server.w, whole.server.w))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    main(parser.parse_args().rounds)
