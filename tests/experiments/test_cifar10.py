"""What the training of CIFAR-10 sees."""

import pytest
import torch

from twofour.demo.resnet import normalise


@pytest.mark.parametrize(("border", "wanted"), [("black", normalise(torch.zeros(1, 1, 1, 3))), ("mean", 0.0)])
def test_crops_have_the_border_that_the_net_knows(border, wanted):
    from tasks.cifar10 import Cifar10

    task = Cifar10()
    task.border, task.__dict__["train"] = border, (torch.full((64, 3, 32, 32), 9.0), torch.zeros(64, dtype=torch.long))
    images, _ = task.loader(0).make(torch.arange(64))
    outside = images != 9
    wanted = torch.as_tensor(wanted).expand_as(images)
    assert outside.any((0, 1)).sum() > 32 and (images[outside] == wanted[outside]).all()
    assert not outside[:, :, 4:-4, 4:-4].any() and not outside.all((1, 2, 3)).any()


def test_repetitions_have_the_border_and_the_rate_that_they_say():
    from tasks import GRADIENTS, LOW_BITS, SHRINK, TASKS
    from tasks.cifar10 import Cifar10

    every = [task for tasks in (TASKS, LOW_BITS, GRADIENTS, SHRINK) for task in tasks.values()]
    nets = {task for task in every if issubclass(task, Cifar10)}
    assert {task.name for task in nets if task.border == "black"} == {"cifar10", "cifar10-long"}
    assert [task for task in nets if task.rewound] == [Cifar10]
    task = Cifar10()
    optimizer = task.optimizer([torch.nn.Parameter(torch.ones(1))])
    schedule = task.schedule(optimizer)
    for _ in range(9):
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.001


def test_the_training_on_a_gpu_says_the_border_that_its_crops_have():
    from gpu_training import OnDevice

    class Ones(OnDevice):
        train = test = torch.full((64, 3, 32, 32), 9.0), torch.zeros(64, dtype=torch.long)

    images, _ = Ones(torch.device("cpu"))._augmented(torch.arange(64))
    assert OnDevice.border == "mean" and not OnDevice.rewound
    assert (images == 0).any() and ((images == 0) | (images == 9)).all()
