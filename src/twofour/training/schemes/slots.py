"""Where a scheme puts its parametrisation, and how the parameter comes back to its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.utils import parametrize


class Slot:
    """A parameter's place in its module; it comes back to the same place, since optimiser states go by order."""

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self.module, self.attribute = module, attribute
        self._order = list(module._parameters)

    def parametrise(self, parametrisation: nn.Module) -> None:
        """Compute the weight by `parametrisation` from now on; the parameter stays the same object."""
        parametrize.register_parametrization(self.module, self.attribute, parametrisation)

    def restore(self, *, parametrised: bool) -> None:
        """Make the weight a parameter again: as it was computed last, or the one underneath."""
        parametrize.remove_parametrizations(self.module, self.attribute, leave_parametrized=parametrised)
        parameters = self.module._parameters
        for name in self._order:
            if name in parameters:
                parameters[name] = parameters.pop(name)


def parametrise_all(slots: Sequence[Slot], parametrisations: Iterable[nn.Module]) -> None:
    """Parametrise every slot, or none if one of them cannot be: torch computes each weight once to see."""
    done: list[Slot] = []
    try:
        for slot, parametrisation in zip(slots, parametrisations, strict=True):
            slot.parametrise(parametrisation)
            done.append(slot)
    except BaseException:
        for slot in done:
            slot.restore(parametrised=False)
        raise


def tied(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that stand in several places of a model: a parametrisation would cut them."""
    counts = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {key for key, count in counts.items() if count > 1}
