//! What the words and sizes of flags and files mean.

use super::ConfigError;
use crate::engine::options::{BackendChoice, KvCacheDtype, PreemptionMode};
use crate::telemetry::{QueuePolicy, VictimPolicy};

const MAX_GIB: f64 = 65_536.0;

pub(super) const PREEMPTION_MODES: [(&str, PreemptionMode); 3] =
    [("auto", PreemptionMode::Auto), ("recompute", PreemptionMode::Recompute), ("swap", PreemptionMode::Swap)];

pub(super) const SCHEDULING_POLICIES: [(&str, QueuePolicy); 4] = [
    ("fair", QueuePolicy::Fair),
    ("fcfs", QueuePolicy::Fcfs),
    ("priority", QueuePolicy::Priority),
    ("longest-prefix", QueuePolicy::LongestPrefix),
];

pub(super) const VICTIM_POLICIES: [(&str, VictimPolicy); 3] = [
    ("last-in", VictimPolicy::LastIn),
    ("least-computed", VictimPolicy::LeastComputed),
    ("priority", VictimPolicy::Priority),
];

/// Whether `HF_HUB_OFFLINE` forbids to fetch models.
pub fn is_offline() -> bool {
    std::env::var_os("HF_HUB_OFFLINE").is_some_and(|value| !value.is_empty() && value != "0")
}

/// A size in GiB as bytes.
pub(super) fn gib(name: &'static str, given: Option<f64>, default: f64) -> Result<u64, ConfigError> {
    let size = given.unwrap_or(default);
    if !(0.0..=MAX_GIB).contains(&size) {
        return Err(ConfigError::Invalid { name, message: format!("must be between 0 and {MAX_GIB} GiB, not {size}") });
    }
    Ok((size * (1u64 << 30) as f64) as u64)
}

/// The same where there is no default.
pub(super) fn gib_if(name: &'static str, given: Option<f64>) -> Result<Option<u64>, ConfigError> {
    given.map(|size| gib(name, Some(size), 0.0)).transpose()
}

/// The meaning of the word that a flag or the file gives; the first of `words` where neither does.
pub(super) fn word_of<T: Copy>(
    name: &'static str,
    words: &[(&str, T)],
    flag: Option<&str>,
    file: &Option<String>,
) -> Result<T, ConfigError> {
    let Some(word) = flag.or(file.as_deref()) else { return Ok(words[0].1) };
    words.iter().find(|(known, _)| *known == word).map(|(_, meaning)| *meaning).ok_or_else(|| {
        let known: Vec<&str> = words.iter().map(|(known, _)| *known).collect();
        ConfigError::Invalid { name, message: format!("must be one of {}, not `{word}`", known.join(", ")) }
    })
}

/// The backend that a word names; nothing is [`BackendChoice::Auto`].
pub(super) fn backend(word: Option<&String>) -> Result<BackendChoice, ConfigError> {
    let Some(word) = word else { return Ok(BackendChoice::Auto) };
    BackendChoice::parse(word).ok_or_else(|| {
        let message = format!("must be one of {}, not `{word}`", BackendChoice::WORDS.join(", "));
        ConfigError::Invalid { name: "backend", message }
    })
}

pub(super) fn power_of_two(name: &'static str, value: u32) -> Result<(), ConfigError> {
    if value.is_power_of_two() {
        return Ok(());
    }
    Err(ConfigError::Invalid { name, message: format!("must be a power of two, not {value}") })
}

/// The type that a word names; nothing is [`KvCacheDtype::Auto`].
pub(super) fn kv_cache_dtype(word: Option<&String>) -> Result<KvCacheDtype, ConfigError> {
    let Some(word) = word else { return Ok(KvCacheDtype::Auto) };
    KvCacheDtype::parse(word).ok_or_else(|| ConfigError::Invalid {
        name: "kv_cache_dtype",
        message: format!("must be one of {}, not `{word}`", KvCacheDtype::WORDS.join(", ")),
    })
}
