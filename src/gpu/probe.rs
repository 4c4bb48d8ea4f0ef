//! Tries out at start-up what an adapter claims, where a wrong claim would give wrong numbers.
//!
//! Some drivers report a subgroup size that their code does not have (lavapipe 22.3 with `LP_NATIVE_VECTOR_WIDTH` of 1024
//! and more runs 16 lanes), or number lanes in another order than invocations.

use super::BufferUse;
use super::device::Gpu;
use super::error::GpuError;
use super::recording::Recording;
use super::replay::Replayer;
use super::shader::Defines;

/// True when a workgroup of `size` invocations is one subgroup with lanes in order.
pub(super) fn subgroups_are(gpu: &Gpu, size: u32) -> Result<bool, GpuError> {
    let defines = Defines::new().flag("SUBGROUP").set("SG", i64::from(size));
    let kernel = gpu.kernel("subgroup_probe", &defines)?;
    let seen = gpu.alloc("subgroup probe", 2 * 16 * u64::from(size), BufferUse::Storage)?;
    let bound = gpu.bind(&kernel, &[("seen", &seen.whole())])?;
    let mut recording = Recording::new("subgroup probe");
    recording.dispatch("subgroup probe", &bound, 2);
    let mut replayer = Replayer::new(gpu);
    let ticket = replayer.submit(gpu, &recording, &[seen.whole()])?;
    let finished = replayer.wait(gpu, ticket)?;
    let words: Vec<[u32; 4]> = finished.readback.iter().flat_map(|b| bytemuck::pod_collect_to_vec(b)).collect();
    Ok(words.len() == 2 * size as usize
        && words.iter().enumerate().all(|(i, seen)| *seen == [size, i as u32 % size, size, size - 1]))
}
