//! Where a step's time goes: GPU time by kernel, measured between timestamps while somebody asks for it.
//!
//! Timing puts every dispatch into a pass of its own, which costs a little; nothing is timed otherwise.

use serde::{Deserialize, Serialize};

/// All dispatches of one kernel for one purpose in a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelTime {
    /// The shader's name.
    pub kernel: String,
    /// What it computes, without the number of the layer.
    pub purpose: String,
    pub dispatches: u32,
    pub us: f64,
}

/// The kernels of one step, the one that took longest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KernelProfile {
    pub step: u64,
    pub num_tokens: u32,
    pub num_rows: u32,
    /// From the start of the first dispatch to the end of the last.
    pub gpu_us: u32,
    pub kernels: Vec<KernelTime>,
}

impl KernelProfile {
    pub fn dispatches(&self) -> u32 {
        self.kernels.iter().map(|k| k.dispatches).sum()
    }

    /// Time inside kernels; the rest of `gpu_us` lies between them.
    pub fn kernels_us(&self) -> f64 {
        self.kernels.iter().map(|k| k.us).sum()
    }
}

/// Sums dispatches, given as (shader, label, microseconds) in their order, by shader and purpose.
pub fn by_kernel<'a>(dispatches: impl IntoIterator<Item = (&'a str, &'a str, f64)>) -> Vec<KernelTime> {
    let mut kernels: Vec<KernelTime> = Vec::new();
    for (kernel, label, us) in dispatches {
        let purpose = purpose(label);
        match kernels.iter_mut().find(|k| k.kernel == kernel && k.purpose == purpose) {
            Some(known) => {
                known.dispatches += 1;
                known.us += us;
            }
            None => kernels.push(KernelTime { kernel: kernel.into(), purpose: purpose.into(), dispatches: 1, us }),
        }
    }
    kernels.sort_by(|a, b| b.us.total_cmp(&a.us));
    kernels
}

/// "layer 12 gate+up" is about "gate+up".
fn purpose(label: &str) -> &str {
    let Some(rest) = label.strip_prefix("layer ") else { return label };
    rest.trim_start_matches(|c: char| c.is_ascii_digit()).trim_start()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_summed_and_the_longest_comes_first() {
        let dispatches = [("norm", "norm", 1.0), ("matmul_i8", "layer 0 qkv", 5.0), ("matmul_i8", "layer 11 qkv", 6.0)];
        let kernels = by_kernel(dispatches);
        let time = |kernel: &str, purpose: &str, dispatches, us| KernelTime {
            kernel: kernel.into(),
            purpose: purpose.into(),
            dispatches,
            us,
        };
        assert_eq!(kernels, [time("matmul_i8", "qkv", 2, 11.0), time("norm", "norm", 1, 1.0)]);
        let profile = KernelProfile { kernels, ..KernelProfile::default() };
        assert_eq!((profile.dispatches(), profile.kernels_us()), (3, 12.0));
    }
}
