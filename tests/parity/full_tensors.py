"""Unsharded weights and gradients of a model on any layout, and their comparison."""

import torch

from plait.verify.parity import full_tensor_on_cpu


def full_weights(model):
    """Return copies of all parameters by name. Collective."""
    return {name: full_tensor_on_cpu(parameter) for name, parameter in model.named_parameters()}


def full_gradients(model):
    """Return copies of all gradients by name, with None for parameters without one. Collective."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        gradients[name] = None if gradient is None else full_tensor_on_cpu(gradient)
    return gradients


def shapes_of(tensors):
    return {name: tensor.shape for name, tensor in tensors.items()}


def names_of_differences(tensors, others):
    """Return the names of the tensors that are not bitwise equal."""
    return [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])]


def assert_equal(actual, expected):
    """Fail unless both have the same names and every tensor the same bits."""
    assert actual.keys() == expected.keys()
    assert names_of_differences(actual, expected) == []


def assert_gradients_close(actual, expected, *, atol=1e-12):
    """Fail unless gradients agree, and are None for the same parameters."""
    for name, gradient in expected.items():
        assert (actual[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(
                actual[name], gradient, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
            )
