//! The smallest change of the options with which a model fits.
//!
//! Guarantees: what is advised was planned and fits, and less of it would not. Where one setting is enough, each that is
//! comes with its value, the one that costs least first; where it takes several, none of them can be left out. It does
//! not attempt other models or adapters.

use super::{Planner, largest};
use crate::engine::options::{EngineOptions, KvCacheDtype};
use crate::executor::wgpu_executor::KvFormat;
use crate::memory;

/// Ways out that are told at most.
const MAX_WAYS: usize = 3;
/// A context, and a step, below which nobody wants to be.
const LEAST_LEN: u32 = 64;
const LEAST_STEP_TOKENS: u32 = 32;
/// Sizes in GiB are told in thousandths.
const GIB_PARTS: f64 = 1000.0;

/// What can be changed, in the order in which it is tried where one alone is not enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    StepTokens,
    Rows,
    KvType,
    Loras,
    MoreBlocks,
    Context,
    FewerBlocks,
    Offload,
}

const ALL: [Setting; 8] = [
    Setting::StepTokens,
    Setting::Rows,
    Setting::KvType,
    Setting::Loras,
    Setting::MoreBlocks,
    Setting::Context,
    Setting::FewerBlocks,
    Setting::Offload,
];

/// A setting, and by how many steps it is changed.
type Change = (Setting, u64);

/// What to do about options that do not fit.
pub(super) fn of(planner: &Planner<'_>, options: &EngineOptions) -> String {
    let fits = |changes: &[Change]| planner.plan(&changed(planner, options, changes)).is_ok();
    let single = |&setting: &Setting| {
        let most = setting.num_steps(planner, options);
        least(1, most, |steps| fits(&[(setting, steps)])).map(|steps| (setting, steps))
    };
    let mut ways: Vec<Change> = ALL.iter().filter_map(single).collect();
    ways.sort_by(|a, b| cost(planner, options, *a).total_cmp(&cost(planner, options, *b)));
    let mut ways: Vec<Vec<Change>> = ways.into_iter().take(MAX_WAYS).map(|change| vec![change]).collect();
    if ways.is_empty() {
        ways.extend(several(planner, options, &fits));
    }
    let words = |changes: &Vec<Change>| {
        let changed = changed(planner, options, changes);
        changes.iter().map(|(setting, _)| setting.words(&changed)).collect::<Vec<_>>().join(" ")
    };
    match ways.iter().map(words).collect::<Vec<_>>().join(", or ") {
        none if none.is_empty() => "no setting makes it fit: choose a smaller or more strongly quantised model \
                                    (`kvasir quantize` makes a folder smaller), or close other programs"
            .into(),
        words => format!("use {words}"),
    }
}

/// The changes of which none can be left out or lessened, where all that there are would do.
fn several(planner: &Planner<'_>, options: &EngineOptions, fits: &dyn Fn(&[Change]) -> bool) -> Option<Vec<Change>> {
    let mut changes: Vec<Change> = Vec::new();
    for setting in ALL {
        let most = setting.num_steps(planner, options);
        changes.extend((most > 0).then_some((setting, most)));
        if fits(&changes) {
            break;
        }
    }
    // What costs most came last, and is lessened first.
    for i in (0..changes.len()).rev() {
        let with = |steps| {
            let mut lessened = changes.clone();
            lessened[i].1 = steps;
            lessened
        };
        let steps = least(0, changes[i].1, |steps| fits(&with(steps)))?;
        changes[i].1 = steps;
    }
    changes.retain(|change| change.1 > 0);
    Some(changes)
}

/// The smallest number in `first..=last` that passes, where all above one that passes do so too.
fn least(first: u64, last: u64, passes: impl Fn(u64) -> bool) -> Option<u64> {
    let reversed = last.checked_sub(first)?;
    largest(0, reversed, |n| passes(last - n)).map(|n| last - n)
}

fn changed(planner: &Planner<'_>, options: &EngineOptions, changes: &[Change]) -> EngineOptions {
    let mut options = options.clone();
    changes.iter().for_each(|(setting, steps)| setting.apply(planner, &mut options, *steps));
    options
}

/// How much is lost, by rule of thumb: the part that goes, weighted by how much it is missed.
fn cost(planner: &Planner<'_>, options: &EngineOptions, (setting, steps): Change) -> f64 {
    let part = |of: u64| steps as f64 / of.max(1) as f64;
    match setting {
        Setting::MoreBlocks => 0.0,
        Setting::StepTokens => 0.25 * part(options.max_num_batched_tokens.into()),
        Setting::Rows => 0.5 * part(options.max_num_seqs.into()),
        Setting::KvType => 0.25 * steps as f64,
        Setting::Context => part(options.max_model_len.unwrap_or(0).into()),
        Setting::FewerBlocks => part(options.num_gpu_blocks_override.unwrap_or(0).into()),
        Setting::Loras => 1.0 + part(options.lora.max_loras.into()),
        Setting::Offload => 2.0 + part(planner.sizes.layers.len() as u64),
    }
}

/// Types of the cache that take less than this one, the largest first.
fn smaller_types(options: &EngineOptions) -> &'static [KvCacheDtype] {
    match options.kv_format() {
        KvFormat::F32 => &[KvCacheDtype::F16, KvCacheDtype::Int8],
        KvFormat::F16 => &[KvCacheDtype::Int8],
        KvFormat::I8 => &[],
    }
}

impl Setting {
    /// By how many steps it can be changed; each more takes less memory than the one before.
    fn num_steps(self, planner: &Planner<'_>, options: &EngineOptions) -> u64 {
        let down_to = |now: u32, least: u32| u64::from(now.saturating_sub(least));
        match self {
            Setting::StepTokens => down_to(options.max_num_batched_tokens, LEAST_STEP_TOKENS),
            Setting::Rows => down_to(options.max_num_seqs, 1),
            Setting::KvType => smaller_types(options).len() as u64,
            Setting::Loras => down_to(options.lora.max_loras, (options.lora.modules.len() as u32).max(1)),
            Setting::Context => options.max_model_len.map_or(0, |len| down_to(len, LEAST_LEN.min(len / 2).max(2))),
            // A context that was asked for keeps its room.
            Setting::FewerBlocks => options.num_gpu_blocks_override.map_or(0, |n| {
                let needed = options.max_model_len.map(|len| needed_blocks(planner, options, len));
                down_to(n, needed.unwrap_or(memory::MIN_BLOCKS))
            }),
            // To what the context needs, at once.
            Setting::MoreBlocks => match (options.num_gpu_blocks_override, options.max_model_len) {
                (Some(blocks), Some(len)) => u64::from(blocks < needed_blocks(planner, options, len)),
                _ => 0,
            },
            Setting::Offload => match options.cpu_offload_bytes {
                // Left open, as many layers are taken as are needed.
                None => 0,
                Some(_) if planner.is_cpu(options) => 0,
                Some(bytes) => planner.sizes.layers.len() as u64 - u64::from(planner.sizes.layers_within(bytes)),
            },
        }
    }

    fn apply(self, planner: &Planner<'_>, options: &mut EngineOptions, steps: u64) {
        if steps == 0 {
            return;
        }
        let n = u32::try_from(steps).unwrap_or(u32::MAX);
        match self {
            Setting::StepTokens => options.max_num_batched_tokens -= n,
            Setting::Rows => options.max_num_seqs -= n,
            Setting::KvType => options.kv_cache_dtype = smaller_types(options)[n as usize - 1],
            Setting::Loras => options.lora.max_loras -= n,
            Setting::Context => options.max_model_len = options.max_model_len.map(|len| len - n),
            Setting::FewerBlocks => {
                options.num_gpu_blocks_override = options.num_gpu_blocks_override.map(|blocks| blocks - n);
            }
            Setting::MoreBlocks => {
                let needed = options.max_model_len.map(|len| needed_blocks(planner, options, len));
                options.num_gpu_blocks_override = options.num_gpu_blocks_override.max(needed);
            }
            Setting::Offload => {
                let now = planner.sizes.layers_within(options.cpu_offload_bytes.unwrap_or(0));
                let gib = (planner.sizes.on_host(now + n) as f64 / f64::from(1 << 30) * GIB_PARTS).ceil() / GIB_PARTS;
                options.cpu_offload_bytes = Some((gib * f64::from(1 << 30)) as u64);
            }
        }
    }

    /// The flag that says so.
    fn words(self, options: &EngineOptions) -> String {
        match self {
            Setting::StepTokens => format!("--max-num-batched-tokens {}", options.max_num_batched_tokens),
            Setting::Rows => format!("--max-num-seqs {}", options.max_num_seqs),
            Setting::KvType => format!("--kv-cache-dtype {}", options.kv_cache_dtype.word()),
            Setting::Loras => format!("--max-loras {}", options.lora.max_loras),
            Setting::Context => format!("--max-model-len {}", options.max_model_len.unwrap_or(0)),
            Setting::FewerBlocks | Setting::MoreBlocks => {
                format!("--num-gpu-blocks-override {}", options.num_gpu_blocks_override.unwrap_or(0))
            }
            Setting::Offload => {
                let gib = options.cpu_offload_bytes.unwrap_or(0) as f64 / f64::from(1 << 30);
                format!("--cpu-offload-gb {}", (gib * GIB_PARTS).round() / GIB_PARTS)
            }
        }
    }
}

/// Blocks of a pool that holds a context of so many tokens, the null block included.
fn needed_blocks(planner: &Planner<'_>, options: &EngineOptions, len: u32) -> u32 {
    let config = super::memory_config(options, len);
    memory::blocks_of(planner.model.spec(), &config, len).saturating_add(1)
}
