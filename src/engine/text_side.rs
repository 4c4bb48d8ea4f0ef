//! The text side of a model: tokenizer, chat template and what ends an output, read from the model's files.

use super::loader::LoadFailure;
use crate::ids::TokenId;
use crate::model::gguf::GgufFile;
use crate::model::location::{Location, locate};
use crate::model::{Model, ModelError, files};
use crate::protocol::Pooling;
use crate::tokenizer::folder::{self, FolderVocab};
use crate::tokenizer::{ChatTemplate, GgufVocab, HfTokenizerFiles, Tokenizer, TokenizerError};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// Text to tokens and back for one model.
pub struct TextSide {
    pub tokenizer: Arc<Tokenizer>,
    /// `None` when the model has none, or one that cannot be parsed (see `template_fault`).
    pub template: Option<Arc<ChatTemplate>>,
    /// Any of these ends the output.
    pub eos_token_ids: Vec<TokenId>,
    pub template_fault: Option<String>,
    /// How embeddings are pooled; the error says what is not supported.
    pub pooling: Result<Pooling, String>,
}

/// What tokenizer and template are made of, as it can be sent to another machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TextSource {
    pub vocabulary: Vocabulary,
    /// The template's text.
    pub template: Option<String>,
}

/// How text becomes tokens.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Vocabulary {
    Gguf(GgufVocab),
    HuggingFace(HfTokenizerFiles),
}

impl Vocabulary {
    fn build(self) -> Result<Tokenizer, TokenizerError> {
        match self {
            Vocabulary::Gguf(vocab) => Tokenizer::from_gguf(vocab),
            Vocabulary::HuggingFace(files) => Tokenizer::from_hf(files),
        }
    }
}

/// A template that could be parsed, and else why not.
type Template = (Option<Arc<ChatTemplate>>, Option<String>);

impl TextSource {
    /// Reads the files of an opened model.
    pub fn of(model: &Model) -> Result<TextSource, LoadFailure> {
        let vocabulary = match (model.gguf(), model.folder()) {
            (Some(file), _) => Vocabulary::Gguf(gguf_vocab(file)?),
            (None, Some(folder)) => vocabulary_of_folder(folder, &model.spec().arch)?,
            (None, None) => return Err(LoadFailure::model("the model has no tokenizer", &model.info().path)),
        };
        Ok(TextSource { vocabulary, template: model.chat_template()? })
    }

    /// The tokenizer, and the template if there is one.
    pub fn build(self) -> Result<(Tokenizer, Template), TokenizerError> {
        let tokenizer = self.vocabulary.build()?;
        let template = match self.template.map(|source| ChatTemplate::new(&source, tokenizer.special_tokens())) {
            None => (None, None),
            Some(Ok(template)) => (Some(Arc::new(template)), None),
            Some(Err(error)) => (None, Some(error.to_string())),
        };
        Ok((tokenizer, template))
    }
}

/// The tokenizer of the file or folder at `path`. Its weights are not looked at: they may be missing.
pub fn tokenizer_at(path: &Path) -> Result<Tokenizer, LoadFailure> {
    let vocabulary = match locate(path)? {
        Location::Gguf(file) => Vocabulary::Gguf(gguf_vocab(&GgufFile::open(&file)?)?),
        Location::Folder(folder) => {
            let config = files::read_json_object(&folder.join("config.json"))?.unwrap_or_default();
            let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
            vocabulary_of_folder(&folder, model_type)?
        }
    };
    vocabulary.build().map_err(|e| LoadFailure::model(e, path))
}

/// Reads the text side of an opened model.
pub fn read(model: &Model) -> Result<TextSide, LoadFailure> {
    read_with(model, None)
}

/// The same, with the chat template in another file if one is given. That one must be sound.
pub fn read_with(model: &Model, template_file: Option<&Path>) -> Result<TextSide, LoadFailure> {
    let path = &model.info().path;
    let mut source = TextSource::of(model)?;
    if let Some(file) = template_file {
        source.template = Some(template_of(file)?);
    }
    let (mut tokenizer, (template, template_fault)) = source.build().map_err(|e| LoadFailure::model(e, path))?;
    if let (Some(file), Some(fault)) = (template_file, &template_fault) {
        return Err(LoadFailure::model(fault, file));
    }
    let num_rows = model.spec().vocab_size;
    check_rows(&mut tokenizer, num_rows).map_err(|fault| LoadFailure::model(fault, path))?;
    let mut eos_token_ids = model.spec().eos_token_ids.clone();
    eos_token_ids.extend(tokenizer.eos_id());
    eos_token_ids.extend(tokenizer.end_of_turn_ids());
    eos_token_ids.retain(|&id| id < num_rows);
    eos_token_ids.sort_unstable();
    eos_token_ids.dedup();
    let pooling = pooling(model)?;
    Ok(TextSide { tokenizer: Arc::new(tokenizer), template, eos_token_ids, template_fault, pooling })
}

/// Added tokens may lie beyond the embedding, where texts cannot use them; the vocabulary itself may not.
fn check_rows(tokenizer: &mut Tokenizer, num_rows: u32) -> Result<(), String> {
    let beyond = tokenizer.limit_to(num_rows);
    if beyond.iter().any(|&id| !tokenizer.is_added(id)) {
        let has = tokenizer.vocab_size();
        return Err(format!("the tokenizer has {has} tokens, the model's embedding only {num_rows}"));
    }
    if let Some(&id) = beyond.first() {
        let (text, count) = (tokenizer.token_text(id), beyond.len());
        tracing::warn!("{count} added tokens, {text:?} ({id}) first, are beyond the embedding of {num_rows} tokens");
    }
    Ok(())
}

/// The text of a template file.
fn template_of(file: &Path) -> Result<String, LoadFailure> {
    let bytes = files::read_bytes(file, files::MAX_TOKENIZER_BYTES)?
        .ok_or_else(|| LoadFailure::model("there is no such file for --chat-template", file))?;
    String::from_utf8(bytes).map_err(|_| LoadFailure::model("the chat template is not UTF-8", file))
}

/// What `1_Pooling/config.json` (of sentence-transformers) or a GGUF file's `pooling_type` says; else the last token's.
fn pooling(model: &Model) -> Result<Result<Pooling, String>, ModelError> {
    if let Some(file) = model.gguf() {
        return Ok(match file.u32(&format!("{}.pooling_type", model.spec().arch))? {
            None | Some(0 | 3) => Ok(Pooling::Last),
            Some(1) => Ok(Pooling::Mean),
            Some(other) => Err(format!("the model's pooling type {other} is not supported")),
        });
    }
    let Some(folder) = model.folder() else { return Ok(Ok(Pooling::Last)) };
    if files::read_json_object(&folder.join("2_Dense/config.json"))?.is_some() {
        return Ok(Err("the model has a dense layer after pooling, which is not supported".into()));
    }
    let Some(config) = files::read_json_object(&folder.join("1_Pooling/config.json"))? else {
        return Ok(Ok(Pooling::Last));
    };
    let is_on =
        |(name, on): (&String, &Value)| (name.starts_with("pooling_mode_") && *on == true).then(|| name.clone());
    let modes: Vec<String> = config.iter().filter_map(is_on).collect();
    Ok(match modes.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] | ["pooling_mode_lasttoken"] => Ok(Pooling::Last),
        ["pooling_mode_mean_tokens"] => Ok(Pooling::Mean),
        _ => Err(format!("the model's pooling ({}) is not supported", modes.join(", "))),
    })
}

fn vocabulary_of_folder(folder: &Path, model_type: &str) -> Result<Vocabulary, LoadFailure> {
    Ok(match hf_files(folder)? {
        Some(files) => Vocabulary::HuggingFace(files),
        None => Vocabulary::Gguf(folder_vocab(folder, model_type)?),
    })
}

/// `None` when the folder has no `tokenizer.json`.
fn hf_files(folder: &Path) -> Result<Option<HfTokenizerFiles>, LoadFailure> {
    let path = folder.join("tokenizer.json");
    let Some(tokenizer_json) = files::read_bytes(&path, files::MAX_TOKENIZER_BYTES)? else { return Ok(None) };
    Ok(Some(HfTokenizerFiles {
        tokenizer_json,
        tokenizer_config: object(folder, "tokenizer_config.json")?,
        special_tokens_map: object(folder, "special_tokens_map.json")?,
    }))
}

/// The vocabulary of a folder with older tokenizer files.
fn folder_vocab(folder: &Path, model_type: &str) -> Result<GgufVocab, LoadFailure> {
    let bytes = |name: &str| files::read_bytes(&folder.join(name), files::MAX_TOKENIZER_BYTES);
    let vocab = folder::read(FolderVocab {
        tokenizer_model: bytes("tokenizer.model")?,
        tiktoken: match bytes("tiktoken.model")? {
            Some(ranks) => Some(ranks),
            None => bytes("qwen.tiktoken")?,
        },
        vocab_json: files::read_json_object(&folder.join("vocab.json"))?,
        merges: files::read_text(&folder.join("merges.txt"))?,
        tokenizer_config: object(folder, "tokenizer_config.json")?,
        added_tokens: object(folder, "added_tokens.json")?,
        model_type: model_type.to_owned(),
    });
    vocab.map_err(|e| LoadFailure::model(e, folder))?.ok_or_else(|| {
        LoadFailure::model("the folder has no tokenizer.json, and no tokenizer.model or vocab.json either", folder)
            .with_fix("download the model again with all its files")
    })
}

fn object(folder: &Path, name: &str) -> Result<Option<Value>, ModelError> {
    Ok(files::read_json_object(&folder.join(name))?.map(Value::Object))
}

fn gguf_vocab(file: &GgufFile) -> Result<GgufVocab, LoadFailure> {
    let strings = |key: &str| -> Result<Vec<String>, ModelError> {
        Ok(file.strings(key)?.unwrap_or_default().into_iter().map(String::from).collect())
    };
    let model = file.string("tokenizer.ggml.model")?.ok_or_else(|| {
        LoadFailure::model("the file has no tokenizer (tokenizer.ggml.model is missing)", file.path())
    })?;
    Ok(GgufVocab {
        model: model.into(),
        pre: file.string("tokenizer.ggml.pre")?.map(String::from),
        tokens: strings("tokenizer.ggml.tokens")?,
        scores: file.f32s("tokenizer.ggml.scores")?.unwrap_or_default(),
        token_types: file.i32s("tokenizer.ggml.token_type")?.unwrap_or_default(),
        merges: strings("tokenizer.ggml.merges")?,
        bos: match file.u32("tokenizer.ggml.bos_token_id")? {
            None => file.u32("tokenizer.ggml.cls_token_id")?,
            id => id,
        },
        eos: file.u32("tokenizer.ggml.eos_token_id")?,
        unk: file.u32("tokenizer.ggml.unknown_token_id")?,
        pad: file.u32("tokenizer.ggml.padding_token_id")?,
        add_bos: file.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: file.bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: file.bool("tokenizer.ggml.add_space_prefix")?,
        remove_extra_spaces: file.bool("tokenizer.ggml.remove_extra_whitespaces")?,
        char_map: file.bytes_of("tokenizer.ggml.precompiled_charsmap")?.unwrap_or_default().to_vec(),
        // The format's own spelling.
        sep: file.u32("tokenizer.ggml.seperator_token_id")?,
        lowercase: file.bool("tokenizer.ggml.normalizer.lowercase")?,
        strip_accents: file.bool("tokenizer.ggml.normalizer.strip_accents")?,
    })
}
