"""Answers to the exercise of notebook 13."""

from __future__ import annotations

import torch
from answers import Answers


def in_k_order(weights, owners, contributions):
    output = torch.zeros(contributions.shape[1])
    for k in range(len(owners)):
        output = output + weights[k] * contributions[k]
    return output


def heaviest_first(weights, owners, contributions):
    output = torch.zeros(contributions.shape[1])
    for k in weights.argsort(descending=True):
        output = output + weights[k] * contributions[k]
    return output


def owners_from_the_last(weights, owners, contributions):
    partial = torch.zeros(int(owners.max()) + 1, contributions.shape[1])
    for k in range(len(owners)):
        partial[owners[k]] += weights[k] * contributions[k]
    output = torch.zeros(contributions.shape[1])
    for share in partial.flip(0):
        output = output + share
    return output


def forgets_weights(weights, owners, contributions):
    return contributions.sum(dim=0)


def weighs_as_a_mean(weights, owners, contributions):
    return (weights[:, None] * contributions).mean(dim=0)


def only_rank_0(weights, owners, contributions):
    here = owners == 0
    return (weights[here, None] * contributions[here]).sum(dim=0)


def one_contribution_per_owner(weights, owners, contributions):
    partial = torch.zeros(int(owners.max()) + 1, contributions.shape[1])
    partial[owners] = weights[:, None] * contributions
    output = torch.zeros(contributions.shape[1])
    for share in partial:
        output = output + share
    return output


def keeps_the_owners_apart(weights, owners, contributions):
    partial = torch.zeros(int(owners.max()) + 1, contributions.shape[1])
    for k in range(len(owners)):
        partial[owners[k]] += weights[k] * contributions[k]
    return partial


def in_double_precision(weights, owners, contributions):
    return (weights.double()[:, None] * contributions.double()).sum(dim=0)


def right_and_then_widened(weights, owners, contributions):
    partial = torch.zeros(int(owners.max()) + 1, contributions.shape[1])
    for k in range(len(owners)):
        partial[owners[k]] += weights[k] * contributions[k]
    output = torch.zeros(contributions.shape[1])
    for share in partial:
        output += share
    return output.double()


def for_rows_of_16_numbers(weights, owners, contributions):
    partial = torch.zeros(int(owners.max()) + 1, 16)
    for k in range(len(owners)):
        partial[owners[k]] += weights[k] * contributions[k]
    output = torch.zeros(16)
    for share in partial:
        output += share
    return output


def fused_multiply_add(weights, owners, contributions):
    partial = torch.zeros(int(owners.max()) + 1, contributions.shape[1])
    for k in range(len(owners)):
        exact = partial[owners[k]].double() + weights[k].double() * contributions[k].double()
        partial[owners[k]] = exact.float()  # rounded once, as addcmul_ and add_(alpha=) do where the CPU can
    output = torch.zeros(contributions.shape[1])
    for share in partial:
        output = output + share
    return output


def sums_in_double_and_rounds_once(weights, owners, contributions):
    return (weights.double()[:, None] * contributions.double()).sum(dim=0).float()


def by_matrix_product(weights, owners, contributions):
    partial = torch.zeros(int(owners.max()) + 1, contributions.shape[1], dtype=torch.float64)
    for owner in range(len(partial)):
        partial[owner] = (weights * (owners == owner)).double() @ contributions.double()
    output = torch.zeros(contributions.shape[1])
    for share in partial:
        output = output + share.float()
    return output


def weighs_in_place(weights, owners, contributions):
    contributions *= weights[:, None]
    output = torch.zeros(contributions.shape[1])
    for owner in range(int(owners.max()) + 1):
        share = torch.zeros(contributions.shape[1])
        for k in range(len(owners)):
            if owners[k] == owner:
                share = share + contributions[k]
        output = output + share
    return output


def zeros(weights, owners, contributions):
    return torch.zeros(contributions.shape[1])


def gives_the_input_back(weights, owners, contributions):
    return contributions


def by_matrix_of_partials(weights, owners, contributions):
    partial = torch.zeros(int(owners.max()) + 1, contributions.shape[1])
    for k in range(len(owners)):
        partial[owners[k]] += weights[k] * contributions[k]
    output = torch.zeros(contributions.shape[1])
    for share in partial:
        output += share
    return output


def by_dictionary(weights, owners, contributions):
    shares = {}
    for weight, owner, row in zip(weights, owners.tolist(), contributions, strict=True):
        shares[owner] = shares[owner] + weight * row if owner in shares else weight * row
    total = None
    for owner in sorted(shares):
        total = shares[owner] if total is None else total + shares[owner]
    return total


def by_sorting(weights, owners, contributions):
    output = torch.zeros(contributions.shape[1])
    share, before = torch.zeros(contributions.shape[1]), None
    for k in owners.argsort(stable=True).tolist():
        if before is not None and int(owners[k]) != before:
            output, share = output + share, torch.zeros(contributions.shape[1])
        share, before = share + weights[k] * contributions[k], int(owners[k])
    return output + share


_BITS = "the terms are right and the last bits are not, in any order. Round each product"
_ORDER = "nearly: the terms are right and their order is not"
ANSWERS = {
    "explain_token": Answers(
        wrong=[
            (in_k_order, _ORDER),
            (heaviest_first, _ORDER),
            (owners_from_the_last, _ORDER),
            (forgets_weights, "the weights are missing"),
            (weighs_as_a_mean, "contributions are added, the weights see to the rest"),
            (only_rank_0, "what rank 1 says is missing"),
            (one_contribution_per_owner, "the output differs in 16 of 16 numbers"),
            (keeps_the_owners_apart, "the output is [1, 16] float32, expected [16] float32"),
            (in_double_precision, "the output is [16] float64, expected [16] float32"),
            (right_and_then_widened, "these values are right, their dtype is not: .to(torch.float32)"),
            (for_rows_of_16_numbers, "owners mixed, rank 1 has none; 24 numbers in a row"),
            (fused_multiply_add, _BITS),
            (sums_in_double_and_rounds_once, _BITS),
            (by_matrix_product, _BITS),
            (weighs_in_place, "changes its input `contributions` in place"),
        ],
        lazy=[
            (zeros, "the output differs in 16 of 16 numbers"),
            (gives_the_input_back, "the output is [1, 16] float32, expected [16] float32"),
        ],
        right=[by_matrix_of_partials, by_dictionary, by_sorting],
    )
}
