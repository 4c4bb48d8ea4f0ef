//! The engine without a GPU: the real scheduler and cache on [`crate::executor::paged_fake`], with a small vocabulary, so
//! that screens and tests show real batches, blocks and streams on any machine.
//!
//! Guarantees: the tokens of a request depend on its prompt alone, whatever the schedule. The text is a string of
//! made-up words.

use super::handle::{AdapterSummary, GenerationDefaults, LoadedModel};
use super::loader::{LoadFailure, Loaded, open_disk};
use super::loras::LoraTable;
use super::options::{
    BackendChoice, EngineOptions, FakeFault, FakeOptions, KvCacheDtype, LoraOptions, StepLoop, TuneMode,
};
use super::text_side::{TextSource, Vocabulary};
use super::thread::Loader;
use crate::batch::StepBatch;
use crate::executor::paged_fake::{Attention, FakeConfig, Fault, HIDDEN_SIZE, PagedFake, Reply, Words};
use crate::executor::{ExecError, Executor, StepHandle, StepOutput};
use crate::ids::HostSlot;
use crate::model::lora::Adapter;
use crate::protocol::Pooling;
use crate::telemetry::VictimPolicy;
use crate::tokenizer::{ChatTemplate, GgufVocab, Tokenizer};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Ids 0 to 255 are the bytes, in order.
const IM_START: u32 = 256;
const IM_END: u32 = 257;
const VOCAB: u32 = 258;
/// Words of an answer, about.
const WORDS_PER_REPLY: u32 = 60;
const KV_BYTES_PER_TOKEN: u64 = 4096;

const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

pub(crate) fn engine_options(fake: &FakeOptions) -> EngineOptions {
    EngineOptions {
        backend: BackendChoice::Auto,
        adapter: None,
        max_model_len: Some(fake.max_model_len),
        max_num_seqs: fake.max_num_seqs,
        max_num_batched_tokens: fake.max_num_batched_tokens,
        block_size: fake.block_size,
        gpu_memory_utilization: 1.0,
        gpu_memory_bytes: None,
        cpu_offload_bytes: Some(0),
        num_gpu_blocks_override: Some(fake.num_blocks),
        prefix_caching: true,
        scheduling_policy: fake.scheduling_policy,
        long_prefill_token_threshold: 0,
        adaptive_budget: false,
        victim_policy: VictimPolicy::LastIn,
        preemption: fake.preemption,
        prefix_cache_dir: fake.prefix_cache_dir.clone(),
        prefix_cache_bytes: 64 << 20,
        swap_space_bytes: u64::from(fake.num_host_blocks * fake.block_size) * KV_BYTES_PER_TOKEN,
        precise: false,
        kv_cache_dtype: KvCacheDtype::Auto,
        kv_canary: false,
        lora: LoraOptions::none(),
        floor: false,
        checked_shaders: false,
        matrix_units: false,
        step_loop: StepLoop::Auto,
        chat_template: None,
        max_queue: fake.max_queue,
        seed: Some(0),
        check: fake.check,
        record: fake.record.clone(),
        tune: TuneMode::Never,
        // Nothing is fetched for the simulation.
        cache_dir: std::path::PathBuf::new(),
        offline: true,
    }
}

pub(super) fn loader(fake: FakeOptions) -> Loader {
    // Shared, so that a rebuilt executor goes on with the faults that are left.
    let faults = Arc::new(Mutex::new(VecDeque::from(fake.faults.clone())));
    Box::new(move |request, _| {
        let (config, num_host_blocks, faults) = (config(&fake), fake.num_host_blocks, faults.clone());
        let build = move || FakeExecutor {
            inner: PagedFake::new(config).with_host_blocks(num_host_blocks),
            faults: faults.clone(),
        };
        let executor = build();
        Ok(Loaded {
            model: Arc::new(model(&fake)?),
            disk: open_disk(&request.options, &executor, ([0; 32], PagedFake::host_bytes(fake.block_size)))?,
            executor: Box::new(executor),
            options: request.options.clone(),
            rebuild: Box::new(move |_| Ok(Box::new(build()))),
        })
    })
}

fn config(fake: &FakeOptions) -> FakeConfig {
    FakeConfig {
        num_blocks: fake.num_blocks,
        block_size: fake.block_size,
        vocab_size: VOCAB,
        attention: Attention::Last,
        reply: Reply::Words(Words { first_byte: 0, eos: IM_END, words_per_reply: WORDS_PER_REPLY }),
        step_delay: fake.step_delay,
        kv_bytes_per_block: KV_BYTES_PER_TOKEN * u64::from(fake.block_size),
    }
}

fn model(fake: &FakeOptions) -> Result<LoadedModel, LoadFailure> {
    let fault = |e: String| LoadFailure::engine(format!("the simulation's vocabulary is wrong: {e}"));
    let tokenizer = Tokenizer::from_gguf(vocabulary()).map_err(|e| fault(e.to_string()))?;
    let template = ChatTemplate::new(TEMPLATE, tokenizer.special_tokens()).map_err(|e| fault(e.to_string()))?;
    let pool_tokens = (fake.num_blocks - 1) * fake.block_size;
    Ok(LoadedModel {
        name: "Simulation".into(),
        path: None,
        arch: "simulation".into(),
        quant: "none".into(),
        num_params: 0,
        file_bytes: 0,
        max_model_len: fake.max_model_len.min(pool_tokens),
        vocab_size: VOCAB,
        hidden_size: HIDDEN_SIZE,
        pooling: Ok(Pooling::Last),
        eos_token_ids: vec![IM_END],
        tokenizer: Arc::new(tokenizer),
        template: Some(Arc::new(template)),
        template_fault: None,
        adapter: AdapterSummary {
            name: "Simulated adapter".into(),
            driver: "none".into(),
            backend: "simulation".into(),
            is_cpu: false,
        },
        block_size: fake.block_size,
        num_blocks: fake.num_blocks,
        kv_bytes_per_block: KV_BYTES_PER_TOKEN * u64::from(fake.block_size),
        has_windows: false,
        has_head: true,
        max_num_seqs: fake.max_num_seqs,
        max_num_batched_tokens: fake.max_num_batched_tokens,
        defaults: GenerationDefaults::default(),
        loras: LoraTable::of_simulation(),
    })
}

/// What the simulation's tokenizer and template are made of.
pub(super) fn text_source() -> TextSource {
    TextSource { vocabulary: Vocabulary::Gguf(vocabulary()), template: Some(TEMPLATE.into()) }
}

fn vocabulary() -> GgufVocab {
    let mut tokens: Vec<String> = (0..=255u8).map(|b| byte_char(b).to_string()).collect();
    tokens.extend(["<|im_start|>".into(), "<|im_end|>".into()]);
    let mut token_types = vec![1; tokens.len()];
    token_types[IM_START as usize..].fill(3);
    GgufVocab {
        model: "gpt2".into(),
        pre: None,
        tokens,
        scores: Vec::new(),
        token_types,
        merges: Vec::new(),
        bos: None,
        eos: Some(IM_END),
        unk: None,
        pad: None,
        add_bos: Some(false),
        add_eos: Some(false),
        add_space_prefix: None,
        ..GgufVocab::default()
    }
}

/// The character that byte-level vocabularies write for a byte: printable Latin-1 stands for itself, the rest follows
/// from U+0100 on (GPT-2's `bytes_to_unicode`).
fn byte_char(byte: u8) -> char {
    let is_plain = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_plain(byte) {
        return byte as char;
    }
    let rank = (0..byte).filter(|&b| !is_plain(b)).count() as u32;
    char::from_u32(0x100 + rank).expect("at most 68 bytes are not plain")
}

/// The paged memory of hashes, with the faults that a test asked for.
struct FakeExecutor {
    inner: PagedFake,
    faults: Arc<Mutex<VecDeque<FakeFault>>>,
}

impl Executor for FakeExecutor {
    fn launch(&mut self, batch: &StepBatch) -> Result<StepHandle, ExecError> {
        let fault = self.faults.lock().unwrap_or_else(|e| e.into_inner()).pop_front();
        let reason = || "an injected fault".to_string();
        match fault {
            None | Some(FakeFault::None) => {}
            Some(FakeFault::Rejected) => self.inner.inject(Fault::Launch(ExecError::Rejected(reason()))),
            Some(FakeFault::OutOfMemory) => self.inner.inject(Fault::Launch(ExecError::OutOfMemory(reason()))),
            Some(FakeFault::FailedWait) => self.inner.inject(Fault::Wait(ExecError::Rejected(reason()))),
            Some(FakeFault::DeviceLost) => self.inner.inject(Fault::Wait(ExecError::DeviceLost(reason()))),
            Some(FakeFault::NotFinite) => self.inner.inject(Fault::NotFinite(0)),
            Some(FakeFault::Panic) => panic!("{}", reason()),
        }
        self.inner.launch(batch)
    }

    fn wait(&mut self, handle: StepHandle) -> Result<StepOutput, ExecError> {
        self.inner.wait(handle)
    }

    fn num_blocks(&self) -> u32 {
        self.inner.num_blocks()
    }

    fn block_size(&self) -> u32 {
        self.inner.block_size()
    }

    fn vocab_size(&self) -> u32 {
        self.inner.vocab_size()
    }

    fn windows(&self) -> Vec<Option<u32>> {
        self.inner.windows()
    }

    fn kv_bytes_per_block(&self) -> u64 {
        self.inner.kv_bytes_per_block()
    }

    fn load_adapter(&mut self, adapter: &Arc<Adapter>) -> Result<(), ExecError> {
        self.inner.load_adapter(adapter)
    }

    fn num_host_blocks(&self) -> u32 {
        self.inner.num_host_blocks()
    }

    fn read_host(&self, slot: HostSlot) -> Option<&[u8]> {
        self.inner.read_host(slot)
    }

    fn write_host(&mut self, slot: HostSlot, bytes: &[u8]) -> Result<(), ExecError> {
        self.inner.write_host(slot, bytes)
    }
}

/// The simulation's tokenizer, for tests of what needs text.
#[cfg(test)]
pub(super) fn tokenizer() -> Tokenizer {
    Tokenizer::from_gguf(vocabulary()).expect("the vocabulary is well formed")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::AddSpecial;

    #[test]
    fn text_survives_the_vocabulary() {
        let tokenizer = Tokenizer::from_gguf(vocabulary()).unwrap();
        for text in ["Hello, world", "Grüße 🦀", "a\nb"] {
            let ids = tokenizer.encode(text, AddSpecial::Yes).unwrap();
            assert_eq!(tokenizer.decode(&ids, true), text);
            assert_eq!(ids, text.bytes().map(u32::from).collect::<Vec<_>>());
        }
        assert_eq!(tokenizer.encode("<|im_end|>", AddSpecial::No).unwrap(), [IM_END]);
    }
}
