//! Tries out at start-up what an adapter claims, where a wrong claim would give wrong numbers.
//!
//! Some drivers report a subgroup size that their code does not have (lavapipe 22.3 with `LP_NATIVE_VECTOR_WIDTH` of 1024
//! and more runs 16 lanes), or number lanes in another order than invocations.

use std::sync::Arc;

use super::BufferUse;
use super::buffer::BufferSlice;
use super::device::Gpu;
use super::error::GpuError;
use super::pipeline::Kernel;
use super::recording::Recording;
use super::replay::Replayer;
use super::shader::Defines;

/// True when a workgroup of `size` invocations is one subgroup with lanes in order.
pub(super) fn subgroups_are(gpu: &Gpu, size: u32) -> Result<bool, GpuError> {
    let defines = Defines::new().flag("SUBGROUP").set("SG", i64::from(size));
    let kernel = gpu.kernel("subgroup_probe", &defines)?;
    let seen = gpu.alloc("subgroup probe", 2 * 16 * u64::from(size), BufferUse::Storage)?;
    let words: Vec<[u32; 4]> = run(gpu, &kernel, &seen.whole(), 2)?;
    Ok(words.len() == 2 * size as usize
        && words.iter().enumerate().all(|(i, seen)| *seen == [size, i as u32 % size, size, size - 1]))
}

/// Tokens, rows and columns of the trial product of units_probe.wgsl.
const TRIAL: [u32; 3] = [32, 64, 64];

/// True when a product by cooperative matrices of `side`, on subgroups of `lanes`, is what the CPU says. It is of integers,
/// so that no order of sums excuses a difference, and rows, columns and factors cannot be swapped unseen.
pub(super) fn matrix_units_multiply(gpu: &Gpu, side: u32, lanes: u32) -> Result<bool, GpuError> {
    let defines = Defines::new().flag("SUBGROUP").set("SG", i64::from(lanes)).set("T", i64::from(side));
    let kernel = gpu.kernel("units_probe", &defines)?;
    let [tokens, rows, k] = TRIAL;
    let seen = gpu.alloc("units probe", 4 * u64::from(tokens * rows), BufferUse::Storage)?;
    let got: Vec<f32> = run(gpu, &kernel, &seen.whole(), 1)?;
    let weight = |n: u32, k: u32| ((7 * n + 3 * k) % 11) as f32 - 5.0;
    let activation = |t: u32, k: u32| ((5 * k + 2 * t + 1) % 13) as f32 - 6.0;
    let sum = |t, n| (0..k).map(|k| weight(n, k) * activation(t, k)).sum::<f32>();
    Ok(got == (0..tokens).flat_map(|t| (0..rows).map(move |n| sum(t, n))).collect::<Vec<f32>>())
}

/// What a kernel with one binding writes.
fn run<T: bytemuck::Pod>(
    gpu: &Gpu,
    kernel: &Arc<Kernel>,
    seen: &BufferSlice,
    workgroups: u32,
) -> Result<Vec<T>, GpuError> {
    let bound = gpu.bind(kernel, &[("seen", seen)])?;
    let mut recording = Recording::new("probe");
    recording.dispatch("probe", &bound, workgroups);
    let mut replayer = Replayer::new(gpu);
    let ticket = replayer.submit(gpu, &recording, std::slice::from_ref(seen))?;
    let finished = replayer.wait(gpu, ticket)?;
    Ok(finished.readback.iter().flat_map(|b| bytemuck::pod_collect_to_vec(b)).collect())
}
