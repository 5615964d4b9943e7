"""The peers of benchmarks/speed.py: the kit's MLP, trained with JAX and with PyTorch as their own users write it.

Each function prepares everything, and returns a function that trains one epoch and waits until it is done.
"""

from __future__ import annotations


def with_jax(images, labels, batch: int):
    """The data on the device, an epoch one jitted `lax.scan`, Adam written out with Keras's constants."""
    import jax
    import jax.numpy as jnp

    count, steps = len(images), len(images) // batch
    x, y = jnp.array(images.reshape(count, -1)), jnp.array(labels)
    first, second, key = jax.random.split(jax.random.PRNGKey(0), 3)
    glorot = jax.nn.initializers.glorot_uniform()
    weights = {
        "hidden": (glorot(first, (x.shape[1], 128)), jnp.zeros(128)),
        "out": (glorot(second, (128, 10)), jnp.zeros(10)),
    }
    nothing = jax.tree.map(jnp.zeros_like, weights)
    state = weights, nothing, nothing, jnp.zeros(())

    def loss_and_accuracy(weights, x, y):
        (hidden, hidden_bias), (out, out_bias) = weights["hidden"], weights["out"]
        logits = jax.nn.relu(x @ hidden + hidden_bias) @ out + out_bias
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)
        return jnp.mean(losses), jnp.mean(logits.argmax(axis=1) == y)

    def step(state, chosen):
        weights, first, second, time = state
        some, truth = x[chosen].astype(jnp.float32) / 255, y[chosen]
        kept, gradients = jax.value_and_grad(loss_and_accuracy, has_aux=True)(weights, some, truth)
        time = time + 1
        first = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, first, gradients)
        second = jax.tree.map(lambda old, new: 0.999 * old + 0.001 * new**2, second, gradients)
        rate = 0.001 * jnp.sqrt(1 - 0.999**time) / (1 - 0.9**time)
        weights = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-7), weights, first, second)
        return (weights, first, second, time), kept

    @jax.jit
    def train(state, key):
        order = jax.random.permutation(key, count)[: steps * batch]
        state, (losses, accuracies) = jax.lax.scan(step, state, order.reshape(steps, batch))
        return state, losses.mean(), accuracies.mean()

    def epoch() -> tuple[float, float]:
        nonlocal key, state
        key, now = jax.random.split(key)
        state, loss, accuracy = train(state, now)
        return float(loss), float(accuracy)

    return epoch


def with_torch(images, labels, batch: int, loader: bool = False):
    """Batches indexed by a permutation; or, with `loader`, from a DataLoader."""
    import torch

    x, y = torch.from_numpy(images), torch.from_numpy(labels).long()
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(x[0].numel(), 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    adam, loss_of = torch.optim.Adam(model.parameters()), torch.nn.CrossEntropyLoss()
    pairs = torch.utils.data.TensorDataset(x, y)
    loaded = torch.utils.data.DataLoader(pairs, batch_size=batch, shuffle=True, drop_last=True)

    def indexed():
        order = torch.randperm(len(x))
        for chosen in order[: len(x) // batch * batch].split(batch):
            yield x[chosen], y[chosen]

    def epoch() -> tuple[float, float]:
        losses, right, steps = torch.zeros(()), torch.zeros(()), 0
        for some, truth in loaded if loader else indexed():
            adam.zero_grad()
            logits = model(some.float() / 255)
            loss = loss_of(logits, truth)
            loss.backward()
            adam.step()
            losses, right, steps = losses + loss.detach(), right + (logits.argmax(1) == truth).sum(), steps + 1
        return float(losses) / steps, float(right) / steps / batch

    return epoch
