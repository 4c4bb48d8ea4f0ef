//! Tests of the paged memory of hashes: what a wrong block, slot or copy does to the tokens.

//! The fake gives what the formula gives, and notices what a scheduler may get wrong.

use super::*;
use crate::batch::{BatchRow, HostTransfer, LogitRow, RowLogits};
use crate::ids::{BlockId, SeqSlot};
use crate::protocol::SamplingParams;

const CONFIG: FakeConfig = FakeConfig {
    num_blocks: 8,
    block_size: 2,
    vocab_size: 1_000_000,
    attention: Attention::Every,
    reply: Reply::Tokens,
    step_delay: Duration::ZERO,
    kv_bytes_per_block: 64,
};

fn batch(tokens: &[TokenId], first_position: u32, blocks: &[u32]) -> StepBatch {
    let mut batch = StepBatch::default();
    batch.begin(1, CONFIG.block_size);
    let blocks: Vec<BlockId> = blocks.iter().map(|b| BlockId(*b)).collect();
    let sampling = RowSampling::new(&SamplingParams::greedy(), 0);
    let logits = RowLogits::Last(LogitRow { sampling, counts: &[], biases: &[] });
    batch.push_row(BatchRow {
        slot: SeqSlot(0),
        first_position,
        write_from: first_position,
        tokens,
        blocks: &blocks,
        logits,
    });
    batch
}

fn step(fake: &mut PagedFake, batch: &StepBatch) -> StepOutput {
    let handle = fake.launch(batch).expect("launched");
    fake.wait(handle).expect("ran")
}

fn alone(tokens: &[TokenId]) -> TokenId {
    let mut run = UnpagedRun::default();
    tokens.iter().for_each(|t| run.push(*t));
    run.draw(RowSampling::new(&SamplingParams::greedy(), 0), &[], &[], CONFIG.vocab_size)
}

#[test]
fn chunks_and_scattered_blocks_give_the_token_of_a_run_without_pages() {
    let tokens = [4, 8, 15, 16, 23];
    let mut fake = PagedFake::new(CONFIG);
    assert_eq!(step(&mut fake, &batch(&tokens, 0, &[5, 1, 7])).tokens, [alone(&tokens)]);
    step(&mut fake, &batch(&tokens[..3], 0, &[2, 6, 3]));
    assert_eq!(step(&mut fake, &batch(&tokens[3..], 3, &[2, 6, 3])).tokens, [alone(&tokens)]);
}

#[test]
fn a_wrong_block_or_slot_changes_the_token() {
    let tokens = [4, 8, 15, 16, 23];
    let mut fake = PagedFake::new(CONFIG);
    step(&mut fake, &batch(&tokens[..4], 0, &[2, 6]));
    let stale = batch(&tokens[4..], 4, &[2, 5, 3]);
    assert_ne!(step(&mut fake, &stale).tokens, [alone(&tokens)], "block 5 was never written");
    let mut off_by_one = batch(&tokens[4..], 4, &[2, 6, 3]);
    off_by_one.kv_slots[0] += 1;
    assert_ne!(step(&mut fake, &off_by_one).tokens, [alone(&tokens)]);
    assert_eq!(step(&mut fake, &batch(&tokens[4..], 4, &[2, 6, 3])).tokens, [alone(&tokens)]);
}

#[test]
fn two_writers_of_one_slot_are_refused() {
    let mut fake = PagedFake::new(CONFIG);
    let mut twice = batch(&[1, 2], 0, &[3]);
    twice.kv_slots[1] = twice.kv_slots[0];
    let handle = fake.launch(&twice).expect("launched");
    assert!(matches!(fake.wait(handle), Err(ExecError::Rejected(text)) if text.contains("write slot 6")));
}

#[test]
fn faults_hit_one_step_only() {
    let mut fake = PagedFake::new(CONFIG);
    let prompt = batch(&[4, 8, 15], 0, &[5, 1]);
    fake.inject(Fault::Launch(ExecError::OutOfMemory("test".into())));
    assert_eq!(fake.launch(&prompt).expect_err("injected"), ExecError::OutOfMemory("test".into()));
    fake.inject(Fault::Wait(ExecError::DeviceLost("test".into())));
    let handle = fake.launch(&prompt).expect("launched");
    assert_eq!(fake.wait(handle).expect_err("injected"), ExecError::DeviceLost("test".into()));
    fake.inject(Fault::NotFinite(3));
    assert_eq!(step(&mut fake, &prompt).not_finite, [true]);
    assert_eq!(step(&mut fake, &prompt).tokens, [alone(&[4, 8, 15])]);
}

#[test]
fn content_survives_in_host_memory_and_goes_out_before_it_comes_in() {
    let tokens = [4, 8, 15, 16, 23];
    let mut fake = PagedFake::new(CONFIG).with_host_blocks(3);
    step(&mut fake, &batch(&tokens[..4], 0, &[2, 6]));
    let transfer = |block, host| HostTransfer { block: BlockId(block), host: HostSlot(host) };
    // Another sequence takes block 2 in the step that saves it; later the content comes back elsewhere.
    let mut other = batch(&[9, 9], 0, &[2]);
    other.swap_out = vec![transfer(2, 1)];
    step(&mut fake, &other);
    let copy = fake.read_host(HostSlot(1)).expect("stored").to_vec();
    fake.write_host(HostSlot(2), &copy).expect("a whole block");
    let mut resumed = batch(&tokens[4..], 4, &[5, 6, 3]);
    resumed.swap_out = vec![transfer(2, 1)];
    resumed.swap_in = vec![transfer(5, 2)];
    assert_eq!(step(&mut fake, &resumed).tokens, [alone(&tokens)]);
    resumed.swap_in = vec![transfer(5, 0)];
    resumed.swap_out.clear();
    assert!(matches!(fake.launch(&resumed), Err(ExecError::Rejected(text)) if text.contains("host slot 0")));
}

#[test]
fn words_are_words_and_end() {
    let words = Words { first_byte: 3, eos: 1, words_per_reply: 12 };
    let config = FakeConfig { vocab_size: 260, attention: Attention::Last, reply: Reply::Words(words), ..CONFIG };
    let config = FakeConfig { num_blocks: 600, ..config };
    let blocks: Vec<u32> = (1..600).collect();
    let mut fake = PagedFake::new(config);
    let mut tokens: Vec<TokenId> = "hello ".bytes().map(|b| 3 + u32::from(b)).collect();
    let prompt_len = tokens.len();
    tokens.push(step(&mut fake, &batch(&tokens, 0, &blocks)).tokens[0]);
    while tokens.last() != Some(&words.eos) && tokens.len() < 1000 {
        let last = tokens.len() - 1;
        tokens.push(step(&mut fake, &batch(&tokens[last..], last as u32, &blocks)).tokens[0]);
    }
    assert_eq!(tokens.pop(), Some(words.eos), "the reply ends");
    let text: String = tokens[prompt_len..].iter().map(|t| char::from((t - 3) as u8)).collect();
    assert!(text.split([' ', '.']).all(|word| word.len() <= 9), "{text}");
    assert!(text.chars().all(|c| c.is_ascii_lowercase() || c == ' ' || c == '.'), "{text}");
}

#[test]
fn wanted_logits_peak_at_the_token_that_would_be_drawn() {
    let mut fake = PagedFake::new(FakeConfig { vocab_size: 50, ..CONFIG });
    let mut prompt = batch(&[4, 8, 15], 0, &[5, 1]);
    let token = step(&mut fake, &prompt).tokens[0];
    prompt.want = Want::Logits;
    let logits = step(&mut fake, &prompt).logits.expect("wanted");
    assert_eq!(logits.len(), 50);
    assert!(logits.iter().enumerate().all(|(id, l)| *l < logits[token as usize] || id == token as usize));
}
