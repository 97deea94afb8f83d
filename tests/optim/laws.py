"""What holds for every optimizer: groups, state through a file, odd gradients, compiled, under a scaled loss."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class OptimizerLaws:
    """Base of an optimizer's tests; `build` makes one."""

    def build(self, params: Any, **more: Any) -> torch.optim.Optimizer:
        raise NotImplementedError

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """What belongs to a step besides `step()`: Sophia's estimate."""

    @staticmethod
    def model() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
        for step in steps:
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            self.after(optimizer)
        return [p.detach().clone() for p in model.parameters()]

    def test_a_run_that_is_saved_and_loaded_goes_on_bit_for_bit(self) -> None:
        whole = self.model()
        wanted = self.run(whole, self.build(whole.parameters()), range(20))
        first = self.model()
        optimizer = self.build(first.parameters())
        self.run(first, optimizer, range(10))
        file = io.BytesIO()
        torch.save([first.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        second = self.model()
        second.load_state_dict(weights)
        again = self.build(second.parameters(), lr=123.0)
        again.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(self.run(second, again, range(10, 20)), wanted, strict=True))

    def test_groups_have_their_own_rates_and_decay(self) -> None:
        model = self.model()
        head, rest = list(model[2].parameters()), list(model[0].parameters())
        optimizer = self.build([{"params": rest, "lr": 0.0}, {"params": head, "weight_decay": 0.0}])
        before = [p.detach().clone() for p in model.parameters()]
        after = self.run(model, optimizer, range(3))
        assert all(torch.equal(a, b) for a, b in zip(before[:2], after[:2], strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(before[2:], after[2:], strict=True))

    def test_what_has_no_gradient_is_left_alone(self) -> None:
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = self.build([used, unused])
        used.grad = torch.ones(2)
        optimizer.step()
        assert torch.equal(unused.data, torch.ones(2))
        assert unused not in optimizer.state

    def test_many_tensors_at_once_are_each_alone(self) -> None:
        """Of other shapes, dtypes and memory."""
        torch.manual_seed(0)
        starts = [torch.randn(3), torch.randn(2, 4).mT, torch.randn(5).bfloat16(), torch.randn(()), torch.randn(0)]
        gradients = [torch.randn_like(x) for x in starts]
        together = [nn.Parameter(x.clone()) for x in starts]
        joint = self.build(together)
        for p, g in zip(together, gradients, strict=True):
            p.grad = g.clone()
        for _ in range(3):
            joint.step()
        for start, gradient, p in zip(starts, gradients, together, strict=True):
            alone = nn.Parameter(start.clone())
            own = self.build([alone])
            alone.grad = gradient.clone()
            for _ in range(3):
                own.step()
            assert torch.equal(alone.data, p.data)
            assert p.data.stride() == start.stride()

    def test_a_closure_is_called_with_gradients_on(self) -> None:
        p = nn.Parameter(torch.ones(2))
        optimizer = self.build([p])

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = p.square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == 2.0
        assert not torch.equal(p.data, torch.ones(2))

    @pytest.mark.traced
    def test_compiled_in_one_graph_with_a_rate_in_a_tensor(self, unchecked: None) -> None:
        results = []
        for rate in (0.02, torch.tensor(0.02)):
            model = self.model()
            step = self.build(model.parameters(), lr=rate).step
            if isinstance(rate, Tensor):
                step = torch.compile(step, backend="aot_eager", fullgraph=True)
            model(torch.ones(2, 5)).square().mean().backward()
            step()
            results.append(list(model.parameters()))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)

    def test_a_scaled_loss_with_overflow_skips_the_step(self) -> None:
        """As fp16 training does it."""
        model = self.model()
        optimizer = self.build(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(torch.ones(2, 5)).mean() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert scaler.get_scale() == 512.0
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(2, 5)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    @pytest.mark.parametrize(
        ("more", "says"),
        [
            ({"lr": -1.0}, "lr to be a number of at least 0"),
            ({"weight_decay": -0.1}, "weight_decay to be a number of at least 0"),
            ({"betas": (0.9, 1.0)}, "two betas, at least 0 and below 1"),
            ({"betas": (0.9,)}, "two betas"),
        ],
    )
    def test_wrong_numbers_are_refused(self, more: dict[str, Any], says: str, unchecked: None) -> None:
        with pytest.raises(ValueError, match=says):
            self.build([nn.Parameter(torch.ones(1))], **more)

    def test_sparse_gradients_are_refused(self) -> None:
        table = nn.Embedding(4, 2, sparse=True)
        optimizer = self.build(table.parameters())
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match="dense gradients"):
            optimizer.step()
