"""The untouched Hugging Face model, in a process of its own: what a run is checked against.

Imports torch and transformers and nothing of this package, so that no fault of ours can hide in it.

    python -P hf_reference.py request.json answer.pt
"""

import json
import sys

import torch
import transformers


def choice_gap(gate, router_logits, top_k):
    """Distance `[T]` from the K-th to the (K+1)-th choice score: how close a row is to other experts."""
    choice = router_logits.float().sigmoid() + gate.e_score_correction_bias  # [T, E]
    groups = gate.num_group
    if groups > 1:
        grouped = choice.view(len(choice), groups, -1)
        keep = grouped.topk(2, dim=-1).values.sum(-1).topk(gate.topk_group, dim=-1).indices
        dropped = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter_(1, keep, False)
        choice = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).view_as(choice)
    best = choice.topk(min(top_k + 1, choice.shape[1]), dim=-1).values
    return best[:, top_k - 1] - best[:, top_k] if best.shape[1] > top_k else torch.full((len(best),), torch.inf)


@torch.inference_mode()
def answer(request):
    """Greedy text of each prompt alone, then one forward pass over prompt and text: logits, ids, gaps."""
    model_class = getattr(transformers, request["architecture"])
    config = model_class.config_class.from_pretrained(request["model"])
    # the grouped product takes rows that start on 16-byte boundaries only
    width = getattr(torch, request["dtype"]).itemsize
    even = all(n * width % 16 == 0 for n in (config.hidden_size, config.moe_intermediate_size))
    model = model_class.from_pretrained(
        request["model"],
        dtype=getattr(torch, request["dtype"]),
        experts_implementation="grouped_mm" if even else "eager",
    ).eval()
    routed, tensors = {}, {}
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda gate, args, out, n=number: routed.__setitem__(n, (gate, out)))
    for index, prompt in enumerate(request["prompts"]):
        tokens = torch.tensor([prompt])
        if request["tokens"] is None:
            tokens = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=request["max_new_tokens"],
                min_new_tokens=None if request["stop_at_eos"] else request["max_new_tokens"],
                do_sample=False,
                eos_token_id=request["eos_token_id"] if request["stop_at_eos"] else None,
                pad_token_id=request["eos_token_id"],
            )
        else:  # sampled text: the run's own tokens are given, only the pass over them is compared
            tokens = torch.tensor([prompt + request["tokens"][index]])
        new = tokens.shape[1] - len(prompt)
        logits = model(tokens, use_cache=False).logits[0].float()
        tensors[f"tokens.{index}"] = tokens[0, len(prompt) :].contiguous()
        tensors[f"logits.{index}"] = logits[len(prompt) - 1 : len(prompt) - 1 + new].contiguous()
        for number, (gate, (router_logits, _, topk_ids)) in routed.items():
            tensors[f"topk_ids.{index}.{number}"] = topk_ids.int().sort(dim=-1).values.contiguous()
            tensors[f"gap.{index}.{number}"] = choice_gap(gate, router_logits, topk_ids.shape[1]).contiguous()
    return tensors


if __name__ == "__main__":
    with open(sys.argv[1]) as request_file:
        torch.save(answer(json.load(request_file)), sys.argv[2])
