"""cal6.py: motion of clips of true reps, two-pass from pictures, with the adapted decoder; with motion guidance in the clip."""
exec(open("RUN/soup.py").read().split("VT = ")[0].replace('dits = {n: Bundle.open(p).load("dit") for n, p in (("pic", "w15/adaptp/model"), ("clip", "w15/adapt/model"), ("joint", "kept/decoder/model"))}', 'dits = {"a": Bundle.open("w16/adapt/model").load("dit")}'))
@functools.partial(jax.jit, static_argnames=("frames","steps","mode"))
def draw(dit, ctx, motion, key, s, low, frames, steps, mode):
    table = diffusion.make_sampler_table(diffusion.schedule_of(B.protocol), steps)
    shape = (len(ctx), frames, c.latent_height, c.latent_width, c.latent_channels)
    base = jnp.broadcast_to(empty, ctx.shape)
    def f(x, t, g):
        n = len(x)
        if mode == "plain": return dit(x, timestep=jnp.broadcast_to(t, (n,)), motion=motion, context=ctx)
        rows = jnp.concatenate([base if mode != "motion" else ctx, ctx])
        m = jnp.concatenate([motion if mode == "context" else jnp.full_like(motion, low), motion])
        v = dit(jnp.concatenate([x, x]), timestep=jnp.broadcast_to(t, (2 * n,)), motion=m, context=rows)
        u, v = jnp.split(v, 2)
        return u + s * (v - u)
    noise = lambda i: jax.random.normal(jax.random.fold_in(key, i), shape)
    return decode_clip(vae, diffusion.sample(f, diffusion.start_sampler(noise(jnp.int32(5000))), table, noise=noise).x)[0]
def make(ctx, v, s, frames, mode, low=0.6, steps=6, dit=dits["a"]):
    val = np.asarray(v, np.float32)[levels - 1].ravel()
    return np.concatenate([np.asarray(draw(dit, jnp.asarray(ctx[i:i+20], jnp.float32), jnp.asarray(val[i:i+20]), jax.random.key(i), s, low, frames, steps, mode)) for i in (0, 20, 40)])
def show(name, clips):
    got = read_clips(load_reader(), clips)
    row = " ".join(f"{n} {(got[n].reshape(games,5)==truth[n])[truth[n]>=0].mean():.2f}" for n in ("character","accessory","variant","side","distance"))
    d = list(describe(np.asarray(clips).reshape(games, 5, *clips.shape[1:]), true, levels)) if clips.shape[1] > 1 else []
    print(name, row, *d, flush=True)
    f = clips.reshape(games, 5, *clips.shape[1:]); n = clips.shape[1]
    Image.fromarray(np.concatenate([np.concatenate([np.concatenate(list(f[g, :, j]), 1) for j in ((0, 8) if n > 1 else (0,))], 1) for g in range(6)], 0)).save(f"c6-{name}.png")
F = c.latent_frames
W = (0.6, 5, 13, 28, 55)
for sc in (2.5,):
    pics = make(reps, W, sc, 1, "context"); show(f"pic{sc}", pics)
image = np.concatenate([np.asarray(encode_frames(shot, jnp.asarray(pics[i:i+20, 0]))) for i in (0, 20, 40)])
two = reps.copy(); two[:, -image.shape[1]:] = image
show("true-plain", make(treps, W, 1, F, "plain"))
show("two-motion2.5", make(two, (0.6, 4, 10, 22, 42), 2.5, F, "motion"))
show("two-both1.5", make(two, (0.6, 4, 10, 22, 42), 1.5, F, "both"))
