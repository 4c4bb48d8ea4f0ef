//! A paged memory of hashes that catches every scheduling fault.
//!
//! "Writing K and V" at position p stores a hash of the value *read back through the block table* at p - 1, the token
//! and p; "attention" hashes values it reads back the same way; the next token is drawn from that hash. A wrong slot, a
//! stale prefix block, a block handed out twice or an off-by-one changes a token. [`UnpagedRun`] is the same arithmetic
//! without pages: what each request must get. It does not imitate a language model: text mode makes up words.

mod unpaged;

pub use unpaged::UnpagedRun;

use super::host_store::HostStore;
use super::{ExecError, Executor, StepHandle, StepOutput, StepStats};
use crate::batch::{RowSampling, ScoredToken, StepBatch, TokenPenalty, Want};
use crate::ids::{BlockId, HostSlot, TokenId};
use crate::model::lora::Adapter;
use crate::protocol::TokenLogprobs;
use std::sync::Arc;
use std::time::Duration;

/// Values of a hidden state.
pub const HIDDEN_SIZE: u32 = 16;

/// How much of the memory a logit row reads back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// Every value of the sequence: the cost of a token grows with its position.
    Every,
    /// The last value, which hangs on all before it: constant cost, for long chats.
    Last,
}

/// What the drawn tokens look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Any token of the vocabulary, evenly.
    Tokens,
    /// Words of lower-case letters, spaces and full stops.
    Words(Words),
}

/// Text mode. Token `first_byte + b` stands for the byte `b`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words {
    pub first_byte: TokenId,
    /// The token that ends a reply.
    pub eos: TokenId,
    /// One word in so many ends the reply; 0 never ends it.
    pub words_per_reply: u32,
}

/// Shape and behaviour of the fake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FakeConfig {
    /// The null block included.
    pub num_blocks: u32,
    pub block_size: u32,
    pub vocab_size: u32,
    pub attention: Attention,
    pub reply: Reply,
    /// How long each step takes.
    pub step_delay: Duration,
    /// What [`Executor::kv_bytes_per_block`] answers.
    pub kv_bytes_per_block: u64,
}

/// A fault to be met by the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The launch is refused; nothing is written.
    Launch(ExecError),
    /// The step is launched, scribbles over the slots it was to write or copy to, and fails while waited for. A lost device loses
    /// its whole memory.
    Wait(ExecError),
    /// The logits of this logit row (modulo their number) are not finite.
    NotFinite(u32),
}

/// The fake executor.
#[derive(Debug)]
pub struct PagedFake {
    config: FakeConfig,
    windows: Vec<Option<u32>>, // [num_groups]
    values: Vec<u32>,          // [num_blocks * block_size]
    tokens: Vec<TokenId>,      // [num_blocks * block_size], read by text mode only
    written_in: Vec<u64>,      // [num_blocks * block_size], launch that wrote the slot last
    num_launches: u64,
    host: HostStore,
    fault: Option<Fault>,
    in_flight: Option<(u64, Result<StepOutput, ExecError>)>,
}

impl PagedFake {
    /// Memory starts as garbage, so that reading what nobody wrote shows.
    pub fn new(config: FakeConfig) -> Self {
        let num_slots = config.num_blocks as usize * config.block_size as usize;
        let mut fake = PagedFake {
            config,
            windows: vec![None],
            values: vec![0; num_slots],
            tokens: vec![0; num_slots],
            written_in: vec![0; num_slots],
            num_launches: 0,
            host: HostStore::default(),
            fault: None,
            in_flight: None,
        };
        fake.scramble();
        fake
    }

    /// For a model whose layer groups see so far: a group keeps its own values through its own tables, and a token depends
    /// on what each group sees of them.
    pub fn with_windows(mut self, windows: &[Option<u32>]) -> Self {
        self.windows = windows.to_vec();
        self
    }

    /// What a block takes in host memory.
    pub fn host_bytes(block_size: u32) -> u64 {
        u64::from(block_size) * 8
    }

    /// With so many places for blocks in host memory.
    pub fn with_host_blocks(mut self, num_host_blocks: u32) -> Self {
        self.host = HostStore::new(num_host_blocks, Self::host_bytes(self.config.block_size));
        self
    }

    /// The next launch meets this fault.
    pub fn inject(&mut self, fault: Fault) {
        self.fault = Some(fault);
    }

    /// Loses the whole memory, as a lost device does.
    pub fn scramble(&mut self) {
        for (slot, value) in self.values.iter_mut().enumerate() {
            *value = mix(0xdead ^ self.num_launches, slot as u64) as u32;
        }
        (0..self.host.num_slots()).for_each(|slot| self.host.get_mut(HostSlot(slot)).fill(0xad));
    }

    /// Content goes out before any comes in; values and tokens of a slot lie side by side.
    fn swap(&mut self, batch: &StepBatch) {
        for transfer in &batch.swap_out {
            let words = self.slots_of(transfer.block).flat_map(|slot| [self.values[slot], self.tokens[slot]]);
            let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
            self.host.get_mut(transfer.host).copy_from_slice(&bytes);
        }
        for transfer in &batch.swap_in {
            let words: Vec<u32> = bytemuck::pod_collect_to_vec(self.host.get_mut(transfer.host));
            for (slot, words) in self.slots_of(transfer.block).zip(words.chunks_exact(2)) {
                (self.values[slot], self.tokens[slot]) = (words[0], words[1]);
            }
        }
    }

    fn slots_of(&self, block: BlockId) -> std::ops::Range<usize> {
        let size = self.config.block_size as usize;
        block.idx() * size..(block.idx() + 1) * size
    }

    fn run(&mut self, batch: &StepBatch) -> Result<StepOutput, ExecError> {
        self.swap(batch);
        self.copy(batch);
        self.write(batch)?;
        let mut output = StepOutput {
            gpu_us: self.config.step_delay.as_micros() as u32,
            stats: StepStats {
                submits: 1,
                passes: 1,
                dispatches: 1,
                readback_bytes: 4 * batch.num_logits() as u32,
                ..StepStats::default()
            },
            ..StepOutput::default()
        };
        for &(first, number) in &batch.hidden {
            let states = (first..first + number).map(|t| self.hidden_state(batch, t as usize));
            output.hidden.push(states.collect::<Result<Vec<_>, _>>()?.concat());
        }
        let of_token = |s: &ScoredToken| fake_logprobs(s.next, s.num_top, self.config.vocab_size);
        output.scored.extend(batch.scored.iter().map(of_token));
        let mut logits = Vec::new();
        for l in 0..batch.num_logits() {
            let (token, hash) = self.draw(batch, l)?;
            if batch.want == Want::Logits {
                push_logits(
                    &mut logits,
                    token,
                    self.config.vocab_size,
                    batch.positions[batch.logit_tokens[l] as usize],
                );
                continue;
            }
            output.tokens.push(token);
            output.not_finite.push(false);
            let logprobs = |asked| match batch.sampling[l].is_beam {
                true => fake_continuations(token, hash, asked, self.config.vocab_size),
                false => fake_logprobs(token, asked, self.config.vocab_size),
            };
            output.logprobs.push(batch.sampling[l].logprobs.map(logprobs));
        }
        if batch.want == Want::Logits {
            output.logits = Some(logits);
        }
        Ok(output)
    }

    /// Made of the value that was written for the token, which hangs on all before it.
    fn hidden_state(&self, batch: &StepBatch, t: usize) -> Result<Vec<f32>, ExecError> {
        let (row, position) = (batch.row_of_token[t] as usize, batch.positions[t]);
        let slot = self.slot(batch.table(row, 0), position).ok_or_else(|| null_read(0, position))?;
        let value = u64::from(self.values[slot]);
        Ok((0..HIDDEN_SIZE).map(|i| (mix(value, u64::from(i)) % 2001) as f32 / 1000.0 - 1.0).collect())
    }

    fn copy(&mut self, batch: &StepBatch) {
        let size = batch.block_size as usize;
        for copy in &batch.copies {
            let (from, to) = (copy.from as usize * size, copy.to as usize * size);
            self.values.copy_within(from..from + size, to);
            self.tokens.copy_within(from..from + size, to);
        }
    }

    /// All rows write before any row attends, as on a GPU.
    fn write(&mut self, batch: &StepBatch) -> Result<(), ExecError> {
        for row in 0..batch.num_rows() {
            for group in 0..self.windows.len() {
                let table = batch.table(row, group);
                for t in batch.row_start[row] as usize..batch.row_start[row + 1] as usize {
                    self.write_token(batch, table, group, t)?;
                }
            }
        }
        Ok(())
    }

    fn write_token(&mut self, batch: &StepBatch, table: &[u32], group: usize, t: usize) -> Result<(), ExecError> {
        let position = batch.positions[t];
        let sees_before = position > 0 && self.windows[group] != Some(1);
        let before = match sees_before {
            true => Some(self.values[self.slot(table, position - 1).ok_or_else(|| null_read(group, position - 1))?]),
            false => None,
        };
        let slot = batch.kv_slot(t, group) as usize;
        if slot < batch.block_size as usize {
            return Ok(());
        }
        if std::mem::replace(&mut self.written_in[slot], self.num_launches) == self.num_launches {
            return Err(ExecError::Rejected(format!("two tokens of the step write slot {slot}")));
        }
        let adapter = batch.adapter(batch.row_of_token[t] as usize);
        self.values[slot] = value(before, (batch.input_ids[t], adapter), position, group);
        self.tokens[slot] = batch.input_ids[t];
        Ok(())
    }

    /// The token, and the hash of everything that it hangs on.
    fn draw(&self, batch: &StepBatch, l: usize) -> Result<(TokenId, u64), ExecError> {
        let t = batch.logit_tokens[l] as usize;
        let (row, position) = (batch.row_of_token[t] as usize, batch.positions[t]);
        let mut seen = 0;
        for (group, window) in self.windows.iter().enumerate() {
            let first = match self.config.attention {
                Attention::Every => window.map_or(0, |window| (position + 1).saturating_sub(window)),
                Attention::Last => position,
            };
            let table = batch.table(row, group);
            let of_group = (first..=position).try_fold(0, |seen, p| -> Result<u64, ExecError> {
                let slot = self.slot(table, p).ok_or_else(|| null_read(group, p))?;
                Ok(attend(seen, self.values[slot]))
            })?;
            seen = if group == 0 { of_group } else { mix(seen, of_group) };
        }
        let penalties = &batch.penalties[batch.penalty_start[l] as usize..batch.penalty_start[l + 1] as usize];
        let biases = &batch.biases[batch.bias_start[l] as usize..batch.bias_start[l + 1] as usize];
        let hash = draw_hash(seen, &batch.sampling[l], penalties, biases);
        let token = match self.config.reply {
            Reply::Tokens => (hash % u64::from(self.config.vocab_size)) as TokenId,
            Reply::Words(words) => {
                let slots = (0..=position).rev().map_while(|p| self.slot(batch.table(row, 0), p));
                words.next(slots.map(|slot| self.tokens[slot]), hash)
            }
        };
        Ok((self.next_allowed(batch, l, token), hash))
    }

    /// The token, or the next one that the row's mask allows.
    fn next_allowed(&self, batch: &StepBatch, l: usize, token: TokenId) -> TokenId {
        let vocab = self.config.vocab_size;
        let mut order = (0..vocab).map(|i| (token + i) % vocab);
        order.find(|&t| batch.may_draw(l, t)).unwrap_or(token)
    }

    /// `None` where the null block stands: whoever reads there reads what slid out of the window.
    fn slot(&self, table: &[u32], position: u32) -> Option<usize> {
        let block = table[(position / self.config.block_size) as usize];
        (block != 0).then(|| (block * self.config.block_size + position % self.config.block_size) as usize)
    }

    fn scribble(&mut self, batch: &StepBatch) {
        let size = batch.block_size;
        let copied = batch.copies.iter().flat_map(|copy| copy.to * size..(copy.to + 1) * size);
        for slot in copied.chain(batch.kv_slots.iter().copied()) {
            self.values[slot as usize] ^= 0x5bad_5bad;
        }
        for transfer in &batch.swap_in {
            for slot in self.slots_of(transfer.block) {
                self.values[slot] ^= 0x5bad_5bad;
            }
        }
        for transfer in &batch.swap_out {
            self.host.get_mut(transfer.host).iter_mut().for_each(|byte| *byte ^= 0x5b);
        }
    }
}

impl Executor for PagedFake {
    fn launch(&mut self, batch: &StepBatch) -> Result<StepHandle, ExecError> {
        if self.in_flight.is_some() {
            return Err(ExecError::Rejected("the step before was not waited for".into()));
        }
        if batch.block_size != self.config.block_size {
            return Err(ExecError::Rejected(format!("the batch has blocks of {} tokens", batch.block_size)));
        }
        if batch.num_groups() != self.windows.len() {
            return Err(ExecError::Rejected(format!("the batch has tables of {} groups", batch.num_groups())));
        }
        batch.check(self.config.num_blocks, self.config.vocab_size).map_err(ExecError::Rejected)?;
        batch.check_transfers(self.config.num_blocks, self.host.num_slots()).map_err(ExecError::Rejected)?;
        if let Some(t) = batch.swap_in.iter().find(|t| self.host.get(t.host).is_none()) {
            return Err(ExecError::Rejected(format!("nothing was ever stored in host slot {}", t.host)));
        }
        self.num_launches += 1;
        let result = match self.fault.take() {
            Some(Fault::Launch(error)) => return Err(error),
            Some(Fault::Wait(error)) => {
                self.scribble(batch);
                if matches!(error, ExecError::DeviceLost(_)) {
                    self.scramble();
                }
                Err(error)
            }
            Some(Fault::NotFinite(row)) => self.run(batch).map(|mut output| {
                if let Some(row) = (row as usize).checked_rem(output.not_finite.len()) {
                    output.not_finite[row] = true;
                }
                output
            }),
            None => self.run(batch),
        };
        self.in_flight = Some((self.num_launches, result));
        Ok(StepHandle(self.num_launches))
    }

    fn wait(&mut self, handle: StepHandle) -> Result<StepOutput, ExecError> {
        let (number, result) =
            self.in_flight.take().ok_or_else(|| ExecError::Rejected("no step is in flight".into()))?;
        if number != handle.0 {
            return Err(ExecError::Rejected(format!("step {} is not the one in flight", handle.0)));
        }
        if !self.config.step_delay.is_zero() {
            std::thread::sleep(self.config.step_delay);
        }
        result
    }

    fn num_blocks(&self) -> u32 {
        self.config.num_blocks
    }

    fn block_size(&self) -> u32 {
        self.config.block_size
    }

    fn vocab_size(&self) -> u32 {
        self.config.vocab_size
    }

    fn kv_bytes_per_block(&self) -> u64 {
        self.config.kv_bytes_per_block
    }

    fn windows(&self) -> Vec<Option<u32>> {
        self.windows.clone()
    }

    /// Rows of any adapter run: all that is computed hangs on its id alone.
    fn load_adapter(&mut self, _: &Arc<Adapter>) -> Result<(), ExecError> {
        Ok(())
    }

    fn num_host_blocks(&self) -> u32 {
        self.host.num_slots()
    }

    fn read_host(&self, slot: HostSlot) -> Option<&[u8]> {
        self.host.get(slot)
    }

    fn write_host(&mut self, slot: HostSlot, bytes: &[u8]) -> Result<(), ExecError> {
        self.host.put(slot, bytes)
    }
}

impl Words {
    /// `latest_first` walks the sequence backwards; only the current word is read.
    fn next(&self, latest_first: impl Iterator<Item = TokenId>, hash: u64) -> TokenId {
        const VOWELS: &[u8] = b"aeiou";
        const CONSONANTS: &[u8] = b"bcdfghjklmnprstvwz";
        let byte = |token: TokenId| token.checked_sub(self.first_byte).and_then(|b| u8::try_from(b).ok());
        let mut recent = latest_first.map(byte).take(10).peekable();
        let last = recent.peek().copied().flatten();
        let letters = recent.take_while(|b| b.is_some_and(|b| b.is_ascii_lowercase())).count();
        let (dice, pick) = (hash % 1000, (hash >> 32) as usize);
        let ends_word = letters >= 2 && (dice < 300 || letters >= 9);
        if ends_word {
            let ends_reply = self.words_per_reply > 0 && pick.is_multiple_of(self.words_per_reply as usize);
            if ends_reply {
                return self.eos;
            }
            return self.first_byte + TokenId::from(if dice % 8 == 0 { b'.' } else { b' ' });
        }
        let choices = match last {
            Some(b'.') => b" ",
            Some(b) if VOWELS.contains(&b) => CONSONANTS,
            Some(b) if b.is_ascii_lowercase() => VOWELS,
            _ => CONSONANTS,
        };
        self.first_byte + TokenId::from(choices[pick % choices.len()])
    }
}

fn null_read(group: usize, position: u32) -> ExecError {
    ExecError::Rejected(format!("group {group} reads position {position} through the null block"))
}

/// What is stored at `position`; it hangs on the weights' adapter too, as keys and values do.
fn value(before: Option<u32>, (token, adapter): (TokenId, u64), position: u32, group: usize) -> u32 {
    let before = before.map_or(0, |v| u64::from(v) + 1);
    let plain = mix(before << 32 | u64::from(token), u64::from(position) | (group as u64) << 32) as u32;
    if adapter == 0 { plain } else { mix(u64::from(plain), adapter) as u32 }
}

/// Order matters: two values swapped give another result.
fn attend(seen: u64, value: u32) -> u64 {
    mix(seen, u64::from(value) + 1)
}

/// Everything that may influence a draw, so that parameters of another row change the token. Penalty and bias lists
/// count as sets.
fn draw_hash(seen: u64, sampling: &RowSampling, penalties: &[TokenPenalty], biases: &[(TokenId, f32)]) -> u64 {
    let mut hash = mix(seen, u64::from(sampling.position));
    if sampling.temperature > 0.0 {
        hash = mix(hash, sampling.seed);
    }
    let shape = [sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty]
        .map(|x| u64::from(x.to_bits()))
        .into_iter()
        .fold(u64::from(sampling.top_k), mix);
    let penalties = penalties.iter().map(|p| mix(u64::from(p.token), u64::from(p.output_count)));
    let biases = biases.iter().map(|(token, bias)| mix(u64::from(*token) + (1 << 40), u64::from(bias.to_bits())));
    mix(hash ^ shape, penalties.chain(biases).fold(0, u64::wrapping_add))
}

/// Mixes two words so that every input bit reaches every output bit (multiply and xor-shift, as in murmur's finaliser).
fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.rotate_left(32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^= x >> 32;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^= x >> 29;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^ x >> 32
}

/// Logits in [0, 1), and 2 for the token that would be drawn.
fn push_logits(logits: &mut Vec<f32>, token: TokenId, vocab_size: u32, position: u32) {
    let logit = |id: u32| (mix(u64::from(id), u64::from(position)) >> 40) as f32 / (1u64 << 24) as f32;
    logits.extend((0..vocab_size).map(|id| if id == token { 2.0 } else { logit(id) }));
}

/// The drawn token has probability 1/2, its successors in the vocabulary 1/4, 1/8, …
fn fake_logprobs(token: TokenId, num_top: u8, vocab_size: u32) -> TokenLogprobs {
    let logprob = |rank: u32| -((rank + 1) as f32) * std::f32::consts::LN_2;
    let num_top = u32::from(num_top).min(vocab_size);
    let top = (0..num_top).map(|rank| ((token + rank) % vocab_size, logprob(rank))).collect();
    TokenLogprobs { token, logprob: logprob(0), top }
}

/// For beams: log-probabilities that hang on all that was read, so that whatever is read wrongly changes the ranking.
fn fake_continuations(token: TokenId, hash: u64, asked: u8, vocab_size: u32) -> TokenLogprobs {
    let step = |rank: u32| 0.05 + (mix(hash, u64::from(rank)) >> 44) as f32 / (1u64 << 20) as f32;
    let logprob = |rank: u32| (0..=rank).fold(0.0, |sum, rank| sum - step(rank));
    let top = (0..u32::from(asked).min(vocab_size)).map(|rank| ((token + rank) % vocab_size, logprob(rank))).collect();
    TokenLogprobs { token, logprob: logprob(0), top }
}

#[cfg(test)]
mod tests;
