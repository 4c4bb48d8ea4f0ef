//! The engine without a GPU: the real scheduler and cache on [`crate::executor::paged_fake`], with a small vocabulary, so
//! that screens and tests show real batches, blocks and streams on any machine.
//!
//! Guarantees: the tokens of a request depend on its prompt alone, whatever the schedule. The text is a string of short
//! words that mean nothing.

use super::handle::{AdapterSummary, GenerationDefaults, LoadedModel};
use super::loader::{LoadFailure, Loaded};
use super::options::{BackendChoice, CheckLevel, EngineOptions, FakeFault, FakeOptions};
use super::thread::Loader;
use crate::batch::{StepBatch, Want};
use crate::executor::paged_fake::PagedFake;
use crate::executor::{ExecError, Executor, StepHandle, StepOutput};
use crate::ids::TokenId;
use crate::tokenizer::{ChatTemplate, GgufVocab, SpecialTokens, Tokenizer};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Ids 0 to 255 are the bytes, in order.
const NUM_BYTES: u32 = 256;
const WORDS: [&str; 64] = [
    " the", " of", " and", " to", " in", " is", " that", " for", " it", " as", " with", " on", " be", " at", " by", " this",
    " from", " or", " one", " had", " not", " but", " what", " all", " were", " when", " we", " there", " can", " an",
    " your", " which", " their", " if", " do", " will", " each", " how", " them", " then", " many", " some", " so",
    " these", " would", " into", " has", " more", " two", " like", " him", " see", " time", " could", " no", " make",
    " than", " first", " been", " its", " who", " now", ".", ",",
];
const IM_START: u32 = NUM_BYTES + WORDS.len() as u32;
const IM_END: u32 = IM_START + 1;
const VOCAB: u32 = IM_END + 1;
/// One token in this many ends the answer.
const END_ONE_IN: u32 = 400;
/// What the simulation draws from before it is mapped to words; a multiple of nothing in particular.
const RAW_VOCAB: u32 = 1 << 20;
const KV_BYTES_PER_TOKEN: u64 = 4096;

const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

pub(super) fn engine_options(fake: &FakeOptions) -> EngineOptions {
    EngineOptions {
        backend: BackendChoice::Auto,
        adapter: None,
        max_model_len: Some(fake.max_model_len),
        max_num_seqs: fake.max_num_seqs,
        max_num_batched_tokens: fake.max_num_batched_tokens,
        block_size: fake.block_size,
        gpu_memory_utilization: 1.0,
        num_gpu_blocks_override: Some(fake.num_blocks),
        prefix_caching: true,
        adaptive_budget: false,
        precise: false,
        floor: false,
        checked_shaders: false,
        max_queue: fake.max_queue,
        seed: Some(0),
        check: CheckLevel::EveryStep,
    }
}

pub(super) fn loader(fake: FakeOptions) -> Loader {
    // Shared, so that a rebuilt executor goes on with the faults that are left.
    let faults = Arc::new(Mutex::new(VecDeque::from(fake.faults.clone())));
    Box::new(move |request, _| {
        let build = {
            let (fake, faults) = (fake.clone(), faults.clone());
            move || FakeExecutor {
                inner: PagedFake::new(fake.num_blocks, fake.block_size, RAW_VOCAB),
                step_delay: fake.step_delay,
                faults: faults.clone(),
                spoils_row: false,
            }
        };
        let executor = build();
        Ok(Loaded {
            model: Arc::new(model(&fake)?),
            executor: Box::new(executor),
            options: request.options.clone(),
            rebuild: Box::new(move |_| Ok(Box::new(build()))),
        })
    })
}

fn model(fake: &FakeOptions) -> Result<LoadedModel, LoadFailure> {
    let fault = |e: String| LoadFailure::engine(format!("the simulation's vocabulary is wrong: {e}"));
    let tokenizer = Tokenizer::from_gguf(vocabulary()).map_err(|e| fault(e.to_string()))?;
    let special = SpecialTokens { eos: Some("<|im_end|>".into()), ..SpecialTokens::default() };
    let template = ChatTemplate::new(TEMPLATE, special).map_err(|e| fault(e.to_string()))?;
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
        max_num_seqs: fake.max_num_seqs,
        max_num_batched_tokens: fake.max_num_batched_tokens,
        defaults: GenerationDefaults::default(),
    })
}

fn vocabulary() -> GgufVocab {
    let mut tokens: Vec<String> = (0..=255u8).map(|b| byte_char(b).to_string()).collect();
    tokens.extend(WORDS.iter().map(|word| word.bytes().map(byte_char).collect::<String>()));
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

/// A raw draw as a word of the vocabulary, now and then the end.
fn word_of(raw: TokenId) -> TokenId {
    if raw.is_multiple_of(END_ONE_IN) { IM_END } else { NUM_BYTES + raw % WORDS.len() as u32 }
}

/// The paged memory of hashes, with time, words and faults.
struct FakeExecutor {
    inner: PagedFake,
    step_delay: Duration,
    faults: Arc<Mutex<VecDeque<FakeFault>>>,
    /// The step in flight is to report its first row as not finite.
    spoils_row: bool,
}

impl Executor for FakeExecutor {
    fn launch(&mut self, batch: &StepBatch) -> Result<StepHandle, ExecError> {
        let fault = self.faults.lock().unwrap_or_else(|e| e.into_inner()).pop_front();
        self.spoils_row = false;
        match fault.unwrap_or(FakeFault::None) {
            FakeFault::None => {}
            FakeFault::Rejected => return Err(ExecError::Rejected("an injected fault".into())),
            FakeFault::OutOfMemory => return Err(ExecError::OutOfMemory("an injected fault".into())),
            FakeFault::DeviceLost => return Err(ExecError::DeviceLost("an injected fault".into())),
            FakeFault::Panic => panic!("an injected fault"),
            FakeFault::NotFinite => self.spoils_row = true,
        }
        self.inner.launch(batch)
    }

    fn wait(&mut self, handle: StepHandle) -> Result<StepOutput, ExecError> {
        if !self.step_delay.is_zero() {
            std::thread::sleep(self.step_delay);
        }
        let mut output = self.inner.wait(handle)?;
        output.tokens.iter_mut().for_each(|token| *token = word_of(*token));
        for logprobs in output.logprobs.iter_mut().flatten() {
            logprobs.token = word_of(logprobs.token);
            logprobs.top.iter_mut().for_each(|(token, _)| *token = word_of(*token));
        }
        if self.spoils_row
            && let Some(first) = output.not_finite.first_mut()
        {
            *first = true;
        }
        output.gpu_us = self.step_delay.as_micros() as u32;
        Ok(output)
    }

    fn num_blocks(&self) -> u32 {
        self.inner.num_blocks()
    }

    fn block_size(&self) -> u32 {
        self.inner.block_size()
    }

    fn vocab_size(&self) -> u32 {
        VOCAB
    }

    fn kv_bytes_per_block(&self) -> u64 {
        KV_BYTES_PER_TOKEN * u64::from(self.inner.block_size())
    }
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
        }
        assert_eq!(tokenizer.encode("<|im_end|>", AddSpecial::No).unwrap(), [IM_END]);
        assert_eq!(tokenizer.decode(&[NUM_BYTES, NUM_BYTES + 1], true), " the of");
    }
}
