"""The grammar of hunted programs, as data: a row is a statement that may occur at a place of a
program. Braces are filled in when it is drawn (`FILLERS` of programs.py).

A row with several lines is one statement: shrinking keeps or drops it as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = "block"
BEFORE = "before"
OPTIMIZER = "optimizer"
SETTING = "setting"
FORWARD = "forward"
BETWEEN = "between"
STEP = "step"
ZERO = "zero"
AFTER = "after"


@dataclass(frozen=True)
class Row:
    """A statement. kind: its name in signatures; place: of the program; weight: how often it is
    drawn; text: Python, with braces; needs: facts of a program of which all must hold."""

    kind: str
    place: str
    weight: float
    text: str
    needs: tuple[str, ...] = ()


LOSS = "model(x({seed}, {rows})).square().mean()"

# fmt: off
ROWS = (
    Row("mlp", BLOCK, 3, "net.blocks['{new}'] = Mlp()"),
    Row("twice", BLOCK, 1, "net.blocks['{new}'] = Twice()"),
    Row("several", BLOCK, 1, "net.blocks['{new}'] = Several()"),
    Row("outputs", BLOCK, 1.5, "net.blocks['{new}'] = Outputs('{form}')"),
    Row("in place", BLOCK, 1, "net.blocks['{new}'] = InPlace()"),
    Row("attend", BLOCK, 1, "net.blocks['{new}'] = Attend()"),
    Row("gain", BLOCK, 1, "net.blocks['{new}'] = Gain()"),
    Row("recomputed", BLOCK, 1, "net.blocks['{new}'] = Recomputed(use_reentrant={bool})"),
    Row("counting", BLOCK, 1, "net.blocks['{new}'] = Counting()"),
    Row("rank only", BLOCK, 0.7, "net.blocks['{new}'] = RankOnly()"),
    Row("collecting", BLOCK, 0.7, "net.blocks['{new}'] = Collecting()", ("float32",)),
    Row("same block", BLOCK, 0.7, "net.blocks['{new}'] = net.blocks['{block}']"),

    Row("tied head", BEFORE, 1,
        "net.again = nn.Linear(5, 6)\nnet.again.weight = net.enter.weight"),
    Row("tied blocks", BEFORE, 1.5,
        "net.blocks['{mlp}'].up.weight = net.blocks['{mlp}'].up.weight"),
    Row("frozen block", BEFORE, 2, "net.blocks['{block}'].requires_grad_(False)"),
    Row("frozen bias", BEFORE, 1, "net.head.bias.requires_grad_(False)"),
    Row("frozen enter", BEFORE, 1, "net.enter.requires_grad_(False)"),
    Row("wrapped checkpoint", BEFORE, 1,
        "from torch.distributed._composable import checkpoint as composable\n"
        "composable(net.blocks['{block}'])"),
    Row("early hook", BEFORE, 0.7,
        "net.blocks['{block}'].register_forward_pre_hook(lambda m, i: (i[0] * 0.9, *i[1:]))"),

    Row("sgd", OPTIMIZER, 2, "optimizer = torch.optim.SGD(model.parameters(), lr={lr})"),
    Row("momentum", OPTIMIZER, 2,
        "optimizer = torch.optim.SGD(model.parameters(), lr={lr}, momentum=0.9)"),
    Row("adamw", OPTIMIZER, 3,
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)"),
    Row("adamw together", OPTIMIZER, 0.4,
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, foreach=True)"),
    Row("adamw groups", OPTIMIZER, 1,
        "optimizer = torch.optim.AdamW([\n"
        "    {{'params': [p for p in model.parameters() if p.ndim < 2], 'weight_decay': 0.0}},\n"
        "    {{'params': [p for p in model.parameters() if p.ndim > 1], 'lr': 0.02}},\n"
        "], lr=0.01, eps=1e-3)"),
    Row("trained only", OPTIMIZER, 1,
        "trained = [p for p in model.parameters() if p.requires_grad]\n"
        "optimizer = torch.optim.AdamW(trained, eps=1e-3)"),

    Row("adopted", SETTING, 1.5, "optimizer = fully_shard_optimizer(optimizer)", ("not adopted",)),
    Row("scheduler", SETTING, 1,
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)"),
    Row("accumulate hook", SETTING, 0.7,
        "def halve(param):\n"
        "    param.grad.mul_(0.5)\n"
        "for p in model.parameters():\n"
        "    if p.requires_grad:\n"
        "        p.register_post_accumulate_grad_hook(halve)"),
    Row("output hook", SETTING, 0.7,
        "net.blocks['{mlp}'].register_forward_hook(lambda m, i, o: o * 0.5)"),
    Row("backward hook", SETTING, 0.7,
        "def halve_inputs(module, inputs, outputs):\n"
        "    return tuple(None if one is None else one * 0.5 for one in inputs)\n"
        "net.head.register_full_backward_hook(halve_inputs)"),
    Row("backward pre hook", SETTING, 0.5,
        "net.head.register_full_backward_pre_hook(lambda m, o: (o[0] * 0.5,))"),
    Row("stays", SETTING, 1, "model.set_reshard_after_forward({bool})", ("fsdp2",)),
    Row("stays after backward", SETTING, 0.5,
        "model.set_reshard_after_backward({bool})", ("fsdp2",)),
    Row("evaluation mode", SETTING, 0.7, "model.eval()"),
    Row("average", SETTING, 0.7, "average = [full(p) for p in model.parameters()]"),

    Row("pass", FORWARD, 6, LOSS + ".backward()"),
    Row("joint", FORWARD, 1, "(model(x({seed})) - model(x({seed}))).square().mean().backward()"),
    Row("sum of losses", FORWARD, 1, f"({LOSS} + {LOSS}).backward()"),
    Row("skip", FORWARD, 1, "model(x({seed}), skip=['{block}']).square().mean().backward()"),
    Row("repeat", FORWARD, 1, "model(x({seed}), repeat=2).square().mean().backward()"),
    Row("microbatches", FORWARD, 1.5,
        "model.set_requires_gradient_sync(False)\n"
        f"{LOSS}.backward()\n"
        "model.set_requires_gradient_sync(True)\n"
        f"{LOSS}.backward()", ("fsdp2",)),
    Row("last backward", FORWARD, 0.5,
        "model.set_is_last_backward(False)\n"
        f"{LOSS}.backward()\n"
        "model.set_is_last_backward(True)\n"
        f"{LOSS}.backward()", ("fsdp2",)),
    Row("no sync", FORWARD, 1.5,
        "with model.no_sync():\n"
        f"    {LOSS}.backward()\n"
        f"{LOSS}.backward()", ("fsm",)),
    Row("double", FORWARD, 1,
        "inputs = x({seed}).requires_grad_()\n"
        "loss = model(inputs).square().mean()\n"
        "[slope] = torch.autograd.grad(loss, inputs, create_graph=True)\n"
        "(loss + slope.square().mean()).backward()"),
    Row("retained", FORWARD, 0.7,
        f"loss = {LOSS}\n"
        "loss.backward(retain_graph=True)\n"
        "loss.backward()"),
    Row("two losses", FORWARD, 0.7,
        "outputs = model(x({seed}))\n"
        "outputs[:, 0].mean().backward(retain_graph=True)\n"
        "outputs[:, 1].square().mean().backward()"),
    Row("part of output", FORWARD, 0.7, "model(x({seed}))[:1, 0].sum().backward()"),
    Row("input gradient", FORWARD, 0.7,
        "inputs = x({seed}).requires_grad_()\n"
        "model(inputs).square().mean().backward()\n"
        "show('input', inputs.grad)"),
    Row("checkpointed model", FORWARD, 0.7,
        "checkpoint(model, x({seed}), use_reentrant=False).square().mean().backward()"),
    Row("autocast", FORWARD, 0.7,
        "with torch.autocast(device, torch.bfloat16):\n"
        f"    loss = {LOSS}\n"
        "loss.backward()"),
    Row("jvp", FORWARD, 0.25,
        "outputs, slope = torch.func.jvp(model, (x({seed}),), (x({seed}),))\n"
        "(outputs.square().mean() + slope.square().mean()).backward()"),
    Row("vmap", FORWARD, 0.25, "torch.func.vmap(model)(x({seed})).square().mean().backward()"),
    Row("loss of a block", FORWARD, 1,
        "seen = []\n"
        "keep = lambda module, inputs, output: seen.append(tensor_of(output))\n"
        "handle = net.blocks['{block}'].register_forward_hook(keep)\n"
        f"loss = {LOSS}\n"
        "handle.remove()\n"
        "(loss + sum(one.square().mean() for one in seen)).backward()"),
    Row("penalty", FORWARD, 0.7, f"({LOSS} + net.head.weight.square().sum()).backward()"),
    Row("functional call", FORWARD, 0.5,
        "buffers = dict(model.named_buffers())\n"
        "outputs = torch.func.functional_call(model, buffers, (x({seed}),))\n"
        "outputs.square().mean().backward()"),
    Row("shown loss", FORWARD, 1, f"loss = {LOSS}\nshow('loss', loss)\nloss.backward()"),
    Row("no backward", FORWARD, 0.3, f"unused = {LOSS}"),
    Row("raises in forward", FORWARD, 0.7,
        "with caught():\n"
        "    model(x({seed}), fail='{block}').mean().backward()"),
    Row("raises at the end", FORWARD, 0.5,
        "with caught():\n"
        "    model(x({seed}), fail='the end').mean().backward()"),
    Row("raises in backward", FORWARD, 0.5,
        "handle = net.blocks['{mlp}'].register_forward_hook(lambda m, i, o: raises(o))\n"
        "with caught():\n"
        "    model(x({seed})).square().mean().backward()\n"
        "handle.remove()\n"
        "optimizer.zero_grad()"),
    Row("raises in backward and goes on", FORWARD, 0.4,
        "handle = net.blocks['{mlp}'].register_forward_hook(lambda m, i, o: raises(o))\n"
        "with caught():\n"
        "    model(x({seed})).square().mean().backward()\n"
        "handle.remove()\n"
        f"{LOSS}.backward()"),

    Row("clip", BETWEEN, 3,
        "show('norm', torch.nn.utils.clip_grad_norm_(model.parameters(), {small}, {norm}))"),
    Row("own clip", BETWEEN, 3, "show('norm', model.clip_grad_norm_({small}, {norm}))", ("fsm",)),
    Row("clip values", BETWEEN, 1, "torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)"),
    Row("scale gradients", BETWEEN, 1,
        "for p in model.parameters():\n"
        "    if p.grad is not None:\n"
        "        p.grad.mul_(0.5)"),
    Row("scale gradients together", BETWEEN, 0.3,
        "torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)"),
    Row("replace gradients", BETWEEN, 0.7,
        "for p in model.parameters():\n"
        "    if p.grad is not None:\n"
        "        p.grad = p.grad * 0.5"),
    Row("project gradients", BETWEEN, 0.5,
        "for p in model.parameters():\n"
        "    if p.grad is not None:\n"
        "        p.grad.sub_((p.grad * p.detach()).sum() * p.detach(), alpha=0.1)"),
    Row("drop a gradient", BETWEEN, 0.7, "net.head.weight.grad = None"),
    Row("show gradients", BETWEEN, 2, "show_grads(model)"),
    Row("saliency", BETWEEN, 0.7,
        "inputs = x({seed}).requires_grad_()\n"
        "[slope] = torch.autograd.grad(model(inputs).sum(), inputs)\n"
        "show('slope', slope)"),
    Row("evaluation with gradients", BETWEEN, 0.7, "show('evaluation', model(x({seed})))"),
    Row("evaluation between", BETWEEN, 1,
        "with torch.no_grad():\n"
        "    show('evaluation', model(x({seed})))"),

    Row("step", STEP, 1, "optimizer.step()"),

    Row("zero", ZERO, 5, "optimizer.zero_grad()"),
    Row("zero in place", ZERO, 0.7, "optimizer.zero_grad(set_to_none=False)"),
    Row("zero of model", ZERO, 1, "model.zero_grad()"),
    Row("zero by hand", ZERO, 0.7, "for p in model.parameters():\n    p.grad = None"),

    Row("evaluation", AFTER, 2,
        "with torch.no_grad():\n"
        "    show('evaluation', model(x({seed}, {rows})))"),
    Row("inference", AFTER, 1,
        "with torch.inference_mode():\n"
        "    show('evaluation', model(x({seed})))"),
    Row("scheduler step", AFTER, 1, "scheduler.step()", ("scheduler",)),
    Row("change rate", AFTER, 0.7, "optimizer.param_groups[0]['lr'] *= 0.5"),
    Row("show weights", AFTER, 1, "show_weights(model)"),
    Row("write weights", AFTER, 1,
        "with torch.no_grad():\n"
        "    for p in model.parameters():\n"
        "        p.mul_(0.9)"),
    Row("write weights together", AFTER, 0.3,
        "with torch.no_grad():\n"
        "    torch._foreach_mul_(list(model.parameters()), 0.9)"),
    Row("write data", AFTER, 0.5, "net.head.weight.data.mul_(0.9)"),
    Row("copy weights", AFTER, 0.7,
        "with torch.no_grad():\n"
        "    for p in model.parameters():\n"
        "        p.copy_(p * 0.5 + 0.01)"),
    Row("moving average", AFTER, 0.7,
        "for old, p in zip(average, model.parameters()):\n"
        "    old.lerp_(full(p), 0.5)\n"
        "    show('average', old)", ("average",)),
    Row("freeze", AFTER, 1, "net.blocks['{block}'].requires_grad_(False)"),
    Row("unfreeze", AFTER, 2, "net.{frozen}.requires_grad_(True)"),
    Row("freeze one", AFTER, 0.7, "net.head.bias.requires_grad_({bool})"),
    Row("state dict", AFTER, 1,
        "kept = {{key: value.clone() for key, value in model.state_dict().items()}}\n"
        "with torch.no_grad():\n"
        "    for p in model.parameters():\n"
        "        p.mul_(0.5)\n"
        "model.load_state_dict(kept)"),
    Row("full state dict", AFTER, 0.7,
        "options = StateDictOptions(full_state_dict=True)\n"
        "kept = get_model_state_dict(model, options=options)\n"
        "for key in sorted(kept):\n"
        "    show(key.removeprefix('module.'), kept[key])\n"
        "set_model_state_dict(model, kept, options=options)", ("fsdp2",)),
    Row("optimizer state", AFTER, 0.7,
        "set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))",
        ("fsdp2",)),
    Row("full optimizer state", AFTER, 0.7,
        "options = StateDictOptions(full_state_dict=True)\n"
        "kept = get_optimizer_state_dict(model, optimizer, options=options)\n"
        "set_optimizer_state_dict(model, optimizer, kept, options=options)", ("fsdp2",)),
    Row("optimizer's own state", AFTER, 0.5, "optimizer.load_state_dict(optimizer.state_dict())"),
    Row("save and load", AFTER, 0.7,
        "kept = folder()\n"
        "dcp.save({{'model': get_model_state_dict(model)}}, checkpoint_id=kept)\n"
        "with torch.no_grad():\n"
        "    for p in model.parameters():\n"
        "        p.mul_(0.5)\n"
        "read = {{'model': get_model_state_dict(model)}}\n"
        "dcp.load(read, checkpoint_id=kept)\n"
        "set_model_state_dict(model, read['model'])", ("fsdp2",)),
    Row("new optimizer", AFTER, 0.5,
        "optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)"),
    Row("train mode", AFTER, 0.5, "model.train({bool})"),
    Row("unshard", AFTER, 0.5,
        "model.unshard()\n"
        "model.reshard()", ("fsdp2",)),
    Row("unshard a block", AFTER, 0.5,
        "net.blocks['{unit}'].unshard()\n"
        "net.blocks['{unit}'].reshard()", ("fsdp2", "units")),
    Row("call a block", AFTER, 0.5,
        "with torch.no_grad():\n"
        "    show('block', tensor_of(net.blocks['{unit}'](torch.ones(2, 6))))", ("units",)),
)
# fmt: on
