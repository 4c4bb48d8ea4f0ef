//! Settings from flags, environment and file, resolved once; the defaults and limits live here.
//!
//! Precedence: flags, then `KVASIR_*` variables (both arrive in [`EngineArgs`]), then `config.toml`, then the defaults
//! below. Unknown keys of the file become warnings with a suggestion, wrong values become errors that name the key.

mod lora;
mod values;

pub use lora::LoraArgs;
pub use values::is_offline;

use crate::engine::options::{CheckLevel, EngineOptions, PreemptionMode, StepLoop, TuneMode};
use crate::ids::MIN_CONTEXT;
use etcetera::BaseStrategy;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use values::{
    PREEMPTION_MODES, SCHEDULING_POLICIES, VICTIM_POLICIES, backend, gib, gib_if, kv_cache_dtype, power_of_two, word_of,
};

/// Contexts that a flag may ask for.
const CONTEXT_RANGE: (u32, u32) = (MIN_CONTEXT, 1 << 24);

/// Host memory for KV blocks that leave the pool: room for several long chats, taken only as it is filled.
const DEFAULT_SWAP_SPACE_GIB: f64 = 1.0;
/// Files of the prefix cache, for one model.
const DEFAULT_PREFIX_CACHE_GIB: f64 = 8.0;

/// A setting that cannot be used. The message names where it stands and what is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the settings: {message}: {path}")]
    Unreadable { path: String, message: String },
    #[error("the settings file is not valid: {message}: {path}")]
    Malformed { path: String, message: String },
    #[error("{name} {message}")]
    Invalid { name: &'static str, message: String },
    #[error("no folder for settings: {0}")]
    NoHome(String),
}

/// Where things live. `KVASIR_HOME` moves all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dirs {
    /// Holds `config.toml`.
    pub config: PathBuf,
    /// Conversations and presets.
    pub data: PathBuf,
    /// Pipelines and header indexes; may be deleted at any time.
    pub cache: PathBuf,
    pub logs: PathBuf,
}

impl Dirs {
    /// The folders of this user. Nothing is created.
    pub fn resolve() -> Result<Dirs, ConfigError> {
        if let Some(home) = std::env::var_os("KVASIR_HOME").filter(|h| !h.is_empty()) {
            return Ok(Self::under(Path::new(&home)));
        }
        let base = etcetera::base_strategy::choose_native_strategy().map_err(|e| ConfigError::NoHome(e.to_string()))?;
        if cfg!(windows) {
            // Windows' data folder roams between machines; conversations stay on this one.
            let local = base.cache_dir().join("kvasir");
            return Ok(Dirs {
                config: base.config_dir().join("kvasir"),
                cache: local.join("cache"),
                logs: local.join("logs"),
                data: local,
            });
        }
        let logs = match base.state_dir() {
            Some(state) => state.join("kvasir"),
            None => base.home_dir().join("Library/Logs/kvasir"),
        };
        Ok(Dirs {
            config: base.config_dir().join("kvasir"),
            data: base.data_dir().join("kvasir"),
            cache: base.cache_dir().join("kvasir"),
            logs,
        })
    }

    /// Everything under one folder, for portable use.
    pub fn under(home: &Path) -> Dirs {
        Dirs { config: home.to_path_buf(), data: home.join("data"), cache: home.join("cache"), logs: home.join("logs") }
    }

    pub fn config_file(&self) -> PathBuf {
        self.config.join("config.toml")
    }
}

/// `config.toml` as far as this version uses it. Every key is optional.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ConfigFile {
    pub ui: UiSection,
    pub models: ModelsSection,
    pub engine: EngineSection,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct UiSection {
    /// `auto`, `dark` or `light`.
    pub theme: Option<String>,
    pub zoom: Option<f32>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ModelsSection {
    /// Folders to look for models in, besides the usual ones.
    pub dirs: Vec<PathBuf>,
    pub scan_hf: Option<bool>,
    pub scan_lmstudio: Option<bool>,
    pub scan_ollama: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct EngineSection {
    pub backend: Option<String>,
    pub adapter: Option<String>,
    pub max_model_len: Option<HumanInt>,
    pub max_num_seqs: Option<HumanInt>,
    pub max_num_batched_tokens: Option<HumanInt>,
    pub block_size: Option<HumanInt>,
    pub gpu_memory_utilization: Option<f32>,
    pub num_gpu_blocks_override: Option<HumanInt>,
    pub prefix_caching: Option<bool>,
    pub kv_cache_dtype: Option<String>,
    pub scheduling_policy: Option<String>,
    pub long_prefill_token_threshold: Option<HumanInt>,
    pub victim_policy: Option<String>,
    pub preemption_mode: Option<String>,
    pub swap_space: Option<f64>,
    pub prefix_cache_dir: Option<PathBuf>,
    pub prefix_cache_size: Option<f64>,
    pub max_queue: Option<HumanInt>,
    pub gpu_memory_gb: Option<f64>,
    pub cpu_offload_gb: Option<f64>,
}

/// Sections and keys that have a meaning here.
const KNOWN: [(&str, &[&str]); 3] = [
    ("ui", &["theme", "zoom"]),
    ("models", &["dirs", "scan_hf", "scan_lmstudio", "scan_ollama"]),
    (
        "engine",
        &[
            "backend",
            "adapter",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "gpu_memory_utilization",
            "num_gpu_blocks_override",
            "prefix_caching",
            "kv_cache_dtype",
            "scheduling_policy",
            "long_prefill_token_threshold",
            "victim_policy",
            "preemption_mode",
            "swap_space",
            "prefix_cache_dir",
            "prefix_cache_size",
            "max_queue",
            "gpu_memory_gb",
            "cpu_offload_gb",
        ],
    ),
];

impl ConfigFile {
    /// Reads the file, if there is one. The strings are warnings for stderr.
    pub fn load(path: &Path) -> Result<(ConfigFile, Vec<String>), ConfigError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok((ConfigFile::default(), Vec::new())),
            Err(e) => {
                return Err(ConfigError::Unreadable { path: path.display().to_string(), message: e.to_string() });
            }
        };
        Self::parse(&text).map_err(|message| ConfigError::Malformed { path: path.display().to_string(), message })
    }

    /// Parses the text of a settings file; the error says line and fault.
    pub fn parse(text: &str) -> Result<(ConfigFile, Vec<String>), String> {
        let table: toml::Table = text.parse().map_err(|e: toml::de::Error| e.to_string().trim_end().to_string())?;
        let warnings = unknown_keys(&table);
        let file = toml::from_str(text).map_err(|e| e.to_string().trim_end().to_string())?;
        Ok((file, warnings))
    }
}

fn unknown_keys(table: &toml::Table) -> Vec<String> {
    let mut warnings = Vec::new();
    for (section, value) in table {
        let Some((_, keys)) = KNOWN.iter().find(|(name, _)| name == section) else {
            let names: Vec<&str> = KNOWN.iter().map(|(name, _)| *name).collect();
            warnings.push(format!("settings: [{section}] is not known{}", did_you_mean(section, &names)));
            continue;
        };
        for key in value.as_table().into_iter().flat_map(|t| t.keys()) {
            if !keys.contains(&key.as_str()) {
                warnings.push(format!("settings: {section}.{key} is not known{}", did_you_mean(key, keys)));
            }
        }
    }
    warnings
}

/// `, did you mean X?` for the closest of the words, or nothing when none is close.
pub fn did_you_mean(word: &str, known: &[&str]) -> String {
    let closest = known.iter().map(|k| (edit_distance(word, k), *k)).min();
    match closest {
        Some((distance, k)) if distance <= 1 + word.len() / 4 => format!(", did you mean {k}?"),
        _ => String::new(),
    }
}

/// Levenshtein distance in characters.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// A count as people write it: `4096`, `32k` = 32,000, `32K` = 32,768, `25.6k` = 25,600, `1m`, `1M`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HumanInt(pub u32);

impl std::str::FromStr for HumanInt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fault = || format!("`{text}` is not a count such as 4096, 32k (32,000) or 32K (32,768)");
        let trimmed = text.trim();
        let (digits, factor) = match trimmed.char_indices().last() {
            Some((at, 'k')) => (&trimmed[..at], 1e3),
            Some((at, 'K')) => (&trimmed[..at], 1024.0),
            Some((at, 'm')) => (&trimmed[..at], 1e6),
            Some((at, 'M')) => (&trimmed[..at], 1024.0 * 1024.0),
            _ => (trimmed, 1.0),
        };
        if digits.is_empty() || !digits.chars().all(|c| c.is_ascii_digit() || c == '.' || c == '_') {
            return Err(fault());
        }
        let number: f64 = digits.replace('_', "").parse().map_err(|_| fault())?;
        let value = (number * factor).round();
        if (number * factor - value).abs() > 1e-6 || value > f64::from(u32::MAX) {
            return Err(fault());
        }
        Ok(HumanInt(value as u32))
    }
}

impl<'de> Deserialize<'de> for HumanInt {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Number(u32),
            Text(String),
        }
        match Either::deserialize(deserializer)? {
            Either::Number(n) => Ok(HumanInt(n)),
            Either::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// Engine settings as flags and `KVASIR_*` variables say them. The names are those of vLLM where the meaning is the same.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Graphics interface: auto, vulkan, metal or dx12
    #[arg(long, value_name = "NAME", env = "KVASIR_BACKEND", hide_env_values = true)]
    pub backend: Option<String>,
    /// Use the adapter whose name holds this text
    #[arg(long, value_name = "TEXT", env = "KVASIR_ADAPTER", hide_env_values = true)]
    pub adapter: Option<String>,
    /// Longest context in tokens (32k is 32,000, 32K is 32,768)
    #[arg(long, value_name = "N", env = "KVASIR_MAX_MODEL_LEN", hide_env_values = true)]
    pub max_model_len: Option<HumanInt>,
    /// Rows of the batch
    #[arg(long, value_name = "N", env = "KVASIR_MAX_NUM_SEQS", hide_env_values = true)]
    pub max_num_seqs: Option<HumanInt>,
    /// Token budget of a step
    #[arg(long, value_name = "N", env = "KVASIR_MAX_NUM_BATCHED_TOKENS", hide_env_values = true)]
    pub max_num_batched_tokens: Option<HumanInt>,
    /// Tokens of a KV block
    #[arg(long, value_name = "N", env = "KVASIR_BLOCK_SIZE", hide_env_values = true)]
    pub block_size: Option<HumanInt>,
    /// Share of the memory that the engine may take, 0 to 1
    #[arg(long, value_name = "SHARE", env = "KVASIR_GPU_MEMORY_UTILIZATION", hide_env_values = true)]
    pub gpu_memory_utilization: Option<f32>,
    /// Memory of the adapter, in GiB: what is planned has to fit; no interface tells it
    #[arg(long, value_name = "GIB", env = "KVASIR_GPU_MEMORY_GB", hide_env_values = true)]
    pub gpu_memory_gb: Option<f64>,
    /// Keep layers of so many GiB in host memory and stream them at each step, which is slow; 0 never does. Unless given,
    /// layers are kept there only when the model does not fit the adapter's memory otherwise
    #[arg(long, value_name = "GIB", env = "KVASIR_CPU_OFFLOAD_GB", hide_env_values = true)]
    pub cpu_offload_gb: Option<f64>,
    /// Exactly this many KV blocks
    #[arg(long, value_name = "N", env = "KVASIR_NUM_GPU_BLOCKS_OVERRIDE", hide_env_values = true)]
    pub num_gpu_blocks_override: Option<HumanInt>,
    /// Find prompt prefixes that were computed before (the default)
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    pub enable_prefix_caching: bool,
    /// Compute every prompt anew
    #[arg(long)]
    pub no_enable_prefix_caching: bool,
    /// Who is admitted first: fcfs, priority, longest-prefix or fair (the default: clients share by tokens)
    #[arg(long, value_name = "NAME", env = "KVASIR_SCHEDULING_POLICY", hide_env_values = true)]
    pub scheduling_policy: Option<String>,
    /// Tokens of one prompt per step at most; 0 (the default) leaves it to the step's budget
    #[arg(long, value_name = "N", env = "KVASIR_LONG_PREFILL_TOKEN_THRESHOLD", hide_env_values = true)]
    pub long_prefill_token_threshold: Option<HumanInt>,
    /// Who gives way when KV blocks are short: last-in, least-computed or priority
    #[arg(long, value_name = "NAME", env = "KVASIR_VICTIM_POLICY", hide_env_values = true)]
    pub victim_policy: Option<String>,
    /// How preempted requests get their KV back: auto, recompute or swap
    #[arg(long, value_name = "MODE", env = "KVASIR_PREEMPTION_MODE", hide_env_values = true)]
    pub preemption_mode: Option<String>,
    /// Host memory for KV blocks that leave the pool, in GiB; 0 turns it off
    #[arg(long, value_name = "GIB", env = "KVASIR_SWAP_SPACE", hide_env_values = true)]
    pub swap_space: Option<f64>,
    /// Keep prefixes in files under this folder, over restarts
    #[arg(long, value_name = "DIR", env = "KVASIR_PREFIX_CACHE_DIR", hide_env_values = true)]
    pub prefix_cache_dir: Option<PathBuf>,
    /// What those files may take for one model, in GiB
    #[arg(long, value_name = "GIB", env = "KVASIR_PREFIX_CACHE_SIZE", hide_env_values = true)]
    pub prefix_cache_size: Option<f64>,
    /// The reference mode: f32 activations and KV, no integer dot products
    #[arg(long)]
    pub precise: bool,
    /// What keys and values are stored as: auto (f16; f32 with --precise), f16, f32 or int8
    #[arg(long, value_name = "TYPE", env = "KVASIR_KV_CACHE_DTYPE", hide_env_values = true)]
    pub kv_cache_dtype: Option<String>,
    /// Render chats with this Jinja template instead of the model's
    #[arg(long, value_name = "FILE", env = "KVASIR_CHAT_TEMPLATE", hide_env_values = true)]
    pub chat_template: Option<PathBuf>,
    /// Mark every slot of the KV cache with its token and check the marks before each read
    #[arg(long)]
    pub kv_canary: bool,
    #[command(flatten)]
    pub lora: LoraArgs,
    /// Use no optional feature of the adapter
    #[arg(long)]
    pub floor: bool,
    /// Multiply by the adapter's cooperative matrices (f16 factors, f32 sums) where a step has 16 tokens or more: results
    /// then depend on how prompts were cut and batched. An adapter without them is refused
    #[arg(long, conflicts_with_all = ["precise", "floor"])]
    pub matrix_units: bool,
    /// Keep bounds, loop and division checks in every shader
    #[arg(long)]
    pub checked_shaders: bool,
    /// Encode and submit a step only when its batch is known, not while the one before it runs, as on software adapters
    #[arg(long)]
    pub sync_steps: bool,
    /// Encode and submit steps ahead wherever it is possible, also where it costs time, as on software adapters
    #[arg(long, conflicts_with = "sync_steps")]
    pub steps_ahead: bool,
    /// Do not measure kernels on this adapter, and use none of what was measured: each begins as its device class has it
    #[arg(long, conflicts_with = "retune")]
    pub no_tune: bool,
    /// Measure kernels again on this adapter (up to a minute); as a rule that is done once, for 2 seconds
    #[arg(long)]
    pub retune: bool,
    /// Record every step to this file (8 GiB at most), for `kvasir replay` and `kvasir trace`
    #[arg(long, value_name = "FILE", env = "KVASIR_RECORD", hide_env_values = true)]
    pub record: Option<PathBuf>,
    /// Check the invariants of scheduler and cache after every step
    #[arg(long)]
    pub check_invariants: bool,
}

impl EngineArgs {
    fn step_loop(&self) -> StepLoop {
        match (self.sync_steps, self.steps_ahead) {
            (true, _) => StepLoop::Sync,
            (false, true) => StepLoop::Ahead,
            (false, false) => StepLoop::Auto,
        }
    }

    fn tune_mode(&self) -> TuneMode {
        match (self.no_tune, self.retune) {
            (true, _) => TuneMode::Never,
            (false, true) => TuneMode::Again,
            (false, false) => TuneMode::Auto,
        }
    }

    /// The options of a run. `seed` seeds requests that bring none.
    pub fn resolve(
        &self,
        file: &EngineSection,
        cache_dir: &Path,
        seed: Option<u64>,
    ) -> Result<EngineOptions, ConfigError> {
        let backend = backend(self.backend.as_ref().or(file.backend.as_ref()))?;
        let int = |name, flag: Option<HumanInt>, file: Option<HumanInt>, range: (u32, u32)| match flag.or(file) {
            Some(HumanInt(n)) if n < range.0 || n > range.1 => Err(ConfigError::Invalid {
                name,
                message: format!("must be between {} and {}, not {n}", range.0, range.1),
            }),
            given => Ok(given.map(|h| h.0)),
        };
        let block_size = int("block_size", self.block_size, file.block_size, (1, 256))?.unwrap_or(16);
        power_of_two("block_size", block_size)?;
        let utilization = self.gpu_memory_utilization.or(file.gpu_memory_utilization).unwrap_or(0.85);
        if !(utilization > 0.0 && utilization <= 1.0) {
            let message = format!("must be above 0 and at most 1, not {utilization}");
            return Err(ConfigError::Invalid { name: "gpu_memory_utilization", message });
        }
        let prefix_caching = if self.no_enable_prefix_caching {
            false
        } else {
            self.enable_prefix_caching || file.prefix_caching.unwrap_or(true)
        };
        let swap_space_bytes = gib("swap_space", self.swap_space.or(file.swap_space), DEFAULT_SWAP_SPACE_GIB)?;
        let preemption =
            word_of("preemption_mode", &PREEMPTION_MODES, self.preemption_mode.as_deref(), &file.preemption_mode)?;
        if preemption == PreemptionMode::Swap && swap_space_bytes == 0 {
            let message = "cannot be swap where swap_space is 0: there is no host memory to swap to".into();
            return Err(ConfigError::Invalid { name: "preemption_mode", message });
        }
        let cache_size = self.prefix_cache_size.or(file.prefix_cache_size);
        let kv_cache_dtype = kv_cache_dtype(self.kv_cache_dtype.as_ref().or(file.kv_cache_dtype.as_ref()))?;
        Ok(EngineOptions {
            gpu_memory_bytes: gib_if("gpu_memory_gb", self.gpu_memory_gb.or(file.gpu_memory_gb))?,
            cpu_offload_bytes: gib_if("cpu_offload_gb", self.cpu_offload_gb.or(file.cpu_offload_gb))?,
            swap_space_bytes,
            prefix_cache_dir: self.prefix_cache_dir.clone().or(file.prefix_cache_dir.clone()),
            prefix_cache_bytes: gib("prefix_cache_size", cache_size, DEFAULT_PREFIX_CACHE_GIB)?,
            backend,
            adapter: self.adapter.clone().or(file.adapter.clone()).filter(|a| !a.is_empty()),
            max_model_len: int("max_model_len", self.max_model_len, file.max_model_len, CONTEXT_RANGE)?,
            max_num_seqs: int("max_num_seqs", self.max_num_seqs, file.max_num_seqs, (1, 256))?.unwrap_or(16),
            max_num_batched_tokens: int(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                file.max_num_batched_tokens,
                (1, 16_384),
            )?
            .unwrap_or(512),
            block_size,
            gpu_memory_utilization: utilization,
            num_gpu_blocks_override: int(
                "num_gpu_blocks_override",
                self.num_gpu_blocks_override,
                file.num_gpu_blocks_override,
                (2, 1 << 24),
            )?,
            prefix_caching,
            scheduling_policy: word_of(
                "scheduling_policy",
                &SCHEDULING_POLICIES,
                self.scheduling_policy.as_deref(),
                &file.scheduling_policy,
            )?,
            long_prefill_token_threshold: int(
                "long_prefill_token_threshold",
                self.long_prefill_token_threshold,
                file.long_prefill_token_threshold,
                (0, 16_384),
            )?
            .unwrap_or(0),
            adaptive_budget: true,
            preemption,
            victim_policy: word_of(
                "victim_policy",
                &VICTIM_POLICIES,
                self.victim_policy.as_deref(),
                &file.victim_policy,
            )?,
            precise: self.precise,
            kv_cache_dtype,
            chat_template: self.chat_template.clone(),
            kv_canary: self.kv_canary,
            lora: self.lora.resolve()?,
            floor: self.floor,
            checked_shaders: self.checked_shaders,
            matrix_units: self.matrix_units,
            step_loop: self.step_loop(),
            max_queue: int("max_queue", None, file.max_queue, (1, 1 << 20))?.unwrap_or(512),
            seed,
            record: self.record.clone(),
            check: if self.check_invariants { CheckLevel::EveryStep } else { CheckLevel::WhenIdle },
            tune: self.tune_mode(),
            cache_dir: cache_dir.to_path_buf(),
            offline: is_offline(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::QueuePolicy;

    #[test]
    fn human_integers_follow_the_case_of_the_letter() {
        let check = |text: &str, want: Option<u32>| {
            assert_eq!(text.parse::<HumanInt>().ok().map(|h| h.0), want, "{text}");
        };
        check("4096", Some(4096));
        check("32k", Some(32_000));
        check("32K", Some(32_768));
        check("25.6k", Some(25_600));
        check("1m", Some(1_000_000));
        check("1_024", Some(1024));
        for bad in ["", "k", "-1", "1.5", "1e3", "0x10", "99999999999", "5kk", "nan", "1.2.3"] {
            check(bad, None);
        }
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let (file, warnings) = ConfigFile::parse(
            "[engine]\nmax_num_seqs = 4\nblock_size = \"32\"\nprefix_caching = false\nmax_model_len = \"4K\"\n",
        )
        .unwrap();
        assert!(warnings.is_empty(), "{warnings:?}");
        let args = EngineArgs { max_num_seqs: Some(HumanInt(7)), ..EngineArgs::default() };
        let options = args.resolve(&file.engine, Path::new("cache"), None).unwrap();
        assert_eq!((options.max_num_seqs, options.block_size, options.prefix_caching), (7, 32, false));
        assert_eq!((options.max_model_len, options.max_num_batched_tokens), (Some(4096), 512));
        let args = EngineArgs { enable_prefix_caching: true, ..EngineArgs::default() };
        assert!(args.resolve(&file.engine, Path::new("cache"), None).unwrap().prefix_caching);
        assert_eq!(options.scheduling_policy, QueuePolicy::Fair);
        let args = EngineArgs { scheduling_policy: Some("longest-prefix".into()), ..EngineArgs::default() };
        let options = args.resolve(&file.engine, Path::new("cache"), None).unwrap();
        assert_eq!(options.scheduling_policy, QueuePolicy::LongestPrefix);
    }

    #[test]
    fn unknown_keys_warn_with_a_suggestion() {
        let (_, warnings) = ConfigFile::parse("[engine]\nblok_size = 16\nzzz = 1\n[modles]\n").unwrap();
        assert_eq!(
            warnings,
            [
                "settings: engine.blok_size is not known, did you mean block_size?",
                "settings: engine.zzz is not known",
                "settings: [modles] is not known, did you mean models?",
            ]
        );
    }

    #[test]
    fn wrong_values_name_their_key() {
        let error = ConfigFile::parse("[engine]\nblock_size = \"many\"\n").unwrap_err();
        assert!(error.contains("block_size") && error.contains("line 2"), "{error}");
        let args = EngineArgs { block_size: Some(HumanInt(0)), ..EngineArgs::default() };
        let error = args.resolve(&EngineSection::default(), Path::new("cache"), None).unwrap_err().to_string();
        assert_eq!(error, "block_size must be between 1 and 256, not 0");
        let args = EngineArgs { block_size: Some(HumanInt(3)), ..EngineArgs::default() };
        let error = args.resolve(&EngineSection::default(), Path::new("cache"), None).unwrap_err().to_string();
        assert_eq!(error, "block_size must be a power of two, not 3");
        let args = EngineArgs { victim_policy: Some("first".into()), ..EngineArgs::default() };
        let error = args.resolve(&EngineSection::default(), Path::new("cache"), None).unwrap_err().to_string();
        assert_eq!(error, "victim_policy must be one of last-in, least-computed, priority, not `first`");
        let args = EngineArgs { swap_space: Some(-1.0), ..EngineArgs::default() };
        let error = args.resolve(&EngineSection::default(), Path::new("cache"), None).unwrap_err().to_string();
        assert!(error.starts_with("swap_space must be between 0"), "{error}");
        let no_room = EngineSection { swap_space: Some(0.0), ..EngineSection::default() };
        let args = EngineArgs { preemption_mode: Some("swap".into()), ..EngineArgs::default() };
        let error = args.resolve(&no_room, Path::new("cache"), None).unwrap_err().to_string();
        assert!(error.starts_with("preemption_mode cannot be swap where swap_space is 0"), "{error}");
        let args = EngineArgs { backend: Some("cuda".into()), ..EngineArgs::default() };
        assert!(
            args.resolve(&EngineSection::default(), Path::new("cache"), None)
                .unwrap_err()
                .to_string()
                .contains("vulkan")
        );
    }

    #[test]
    fn one_folder_holds_everything_when_asked() {
        let dirs = Dirs::under(Path::new("portable"));
        assert_eq!(dirs.config_file(), Path::new("portable/config.toml"));
        assert!(dirs.data.starts_with("portable") && dirs.cache.starts_with("portable"));
    }
}
