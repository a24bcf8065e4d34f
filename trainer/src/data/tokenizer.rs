//! Text to ids and back: bytes, or the `tokenizer.json` of a model.

use std::any::Any;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use dropless_core::files;
use dropless_model::hf::SpecialTokens;
use serde_json::Value;
use tokenizers::ModelWrapper;

use crate::config::Tokenizer as Named;
use crate::error::{Error, Result};

/// The end of a document of bytes; ids below it are bytes.
pub const END: u32 = 256;
/// The file that says how text becomes ids.
pub const TOKENIZER: &str = "tokenizer.json";
/// The files beside it that a model directory has: names of the special tokens, and their ids.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
/// Files that go with a tokenizer wherever it goes. `generation_config.json` is not among them: it is the model's.
pub(crate) const COPIED: [&str; 4] = [TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja"];
/// The largest of these files that makes any sense.
const LARGEST: u64 = 1 << 28;
/// A longer text goes through a `tokenizer.json` in pieces of about this many bytes, each up to the end of a line.
pub(super) const PIECE: usize = 1 << 20;
/// How far the end of a line may be from there.
const REACH: usize = 1 << 16;

/// How text becomes ids.
#[derive(Debug)]
pub enum Tokenizer {
    /// Bytes are ids 0..255; 256 ends a document.
    Byte,
    /// A `tokenizer.json`.
    Json(Box<Json>),
}

/// A `tokenizer.json`, with what the files beside it say.
#[derive(Debug)]
pub struct Json {
    inner: tokenizers::Tokenizer,
    /// The largest id, and one.
    ids: usize,
    end: u32,
    tokens: SpecialTokens,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl Tokenizer {
    /// The tokenizer that a configuration names.
    ///
    /// # Errors
    /// [`Error::Data`] names the file and what is wrong with it.
    pub fn open(named: &Named) -> Result<Tokenizer> {
        match named {
            Named::Byte => Ok(Tokenizer::Byte),
            Named::File(path) => Tokenizer::open_file(path.as_ref()),
        }
    }

    /// The tokenizer of a file, or of the directory that has it.
    ///
    /// # Errors
    /// As [`open`](Tokenizer::open).
    pub fn open_file(path: &Path) -> Result<Tokenizer> {
        let file = if path.is_dir() { path.join(TOKENIZER) } else { path.to_owned() };
        let folder = file.parent().unwrap_or(Path::new(""));
        if !file.exists() {
            return Err(Error::Data(format!(
                "{}: there is no such tokenizer (data.tokenizer is \"byte\", a tokenizer.json, or a directory that has \
                 one)",
                file.display()
            )));
        }
        let read = |name: &str| match if name == TOKENIZER { file.clone() } else { folder.join(name) } {
            path if path.exists() => Ok(Some(files::read(&path, LARGEST)?)),
            _ => Ok(None),
        };
        Tokenizer::of_files(&file, read)
    }

    /// The tokenizer of these files, `file` and those beside it, of which `read` has the contents by their names. That of
    /// `file` is [`TOKENIZER`] here, and it is there.
    ///
    /// # Errors
    /// As [`open`](Tokenizer::open), and those of `read`.
    pub(crate) fn of_files(file: &Path, read: impl Fn(&str) -> Result<Option<Vec<u8>>>) -> Result<Tokenizer> {
        let json = read(TOKENIZER)?.unwrap_or_default();
        let (config, generation) = (read(TOKENIZER_CONFIG)?, read(GENERATION_CONFIG)?);
        let mut tokenizer = Json::parse(&json, config.as_deref(), generation.as_deref())
            .map_err(|what| Error::Data(format!("{}: {what}", file.display())))?;
        for name in COPIED {
            let contents = if name == TOKENIZER { Some(json.clone()) } else { read(name)? };
            tokenizer.files.extend(contents.map(|contents| (name, contents)));
        }
        Ok(Tokenizer::Json(Box::new(tokenizer)))
    }

    /// Verifies that the model has every id.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn check(&self, vocab: usize, named: &Named) -> Result<()> {
        if self.ids() <= vocab {
            return Ok(());
        }
        let (name, largest) = (String::from(named.clone()), self.ids() - 1);
        Err(Error::Config(format!("model.vocab_size is {vocab}, but data.tokenizer {name:?} has ids up to {largest}")))
    }

    /// The id that ends a document.
    pub fn end(&self) -> u32 {
        match self {
            Tokenizer::Byte => END,
            Tokenizer::Json(json) => json.end,
        }
    }

    /// The number that every id is below.
    pub fn ids(&self) -> usize {
        match self {
            Tokenizer::Byte => END as usize + 1,
            Tokenizer::Json(json) => json.ids,
        }
    }

    /// What a run with this tokenizer writes as its special tokens; None for bytes, which leave that to the model.
    pub fn special_tokens(&self) -> Option<&SpecialTokens> {
        match self {
            Tokenizer::Byte => None,
            Tokenizer::Json(json) => Some(&json.tokens),
        }
    }

    /// Whether a text that is being generated ends with this id.
    pub fn ends(&self, id: u32) -> bool {
        match self {
            Tokenizer::Byte => id == END,
            Tokenizer::Json(json) => json.tokens.eos.contains(&id),
        }
    }

    /// The files that make up the tokenizer; none for bytes.
    pub fn files(&self) -> &[(&'static str, Vec<u8>)] {
        match self {
            Tokenizer::Byte => &[],
            Tokenizer::Json(json) => &json.files,
        }
    }

    /// What a token is called in a text's statistics.
    pub fn unit(&self) -> &'static str {
        match self {
            Tokenizer::Byte => "byte",
            Tokenizer::Json(_) => "token",
        }
    }

    /// The ids of a text, without an end token. A `tokenizer.json` may say that a text begins with a token of its own.
    ///
    /// # Errors
    /// What the tokenizer has to say against the text.
    pub fn encode(&self, text: &str) -> std::result::Result<Vec<u32>, String> {
        let mut ids = Vec::new();
        for (number, piece) in pieces(text.as_bytes(), PIECE).enumerate() {
            ids.extend(self.encode_piece(&text.as_bytes()[piece], number == 0)?);
        }
        Ok(ids)
    }

    /// The ids of a piece of a text, which may be its `first`.
    pub(super) fn encode_piece(&self, piece: &[u8], first: bool) -> std::result::Result<Vec<u32>, String> {
        let Tokenizer::Json(json) = self else {
            return Ok(piece.iter().map(|&byte| byte.into()).collect());
        };
        let text = std::str::from_utf8(piece).map_err(|e| format!("it is not UTF-8: {e}"))?;
        let encoding = guarded(|| json.inner.encode_fast(text, first))?;
        let mut ids = encoding.get_ids().to_vec();
        if first && ids.last() == Some(&json.end) {
            // Every document is closed by one end token, wherever it comes from.
            ids.pop();
        }
        Ok(ids)
    }

    /// The text of ids; what is no text becomes U+FFFD.
    ///
    /// # Errors
    /// What the tokenizer has to say against the ids.
    pub fn decode(&self, ids: &[u32]) -> std::result::Result<String, String> {
        match self {
            Tokenizer::Byte => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Tokenizer::Json(json) => guarded(|| json.inner.decode(ids, true)),
        }
    }

    /// Hash of what the ids depend on.
    pub(super) fn hash(&self, hasher: &mut blake3::Hasher) {
        hasher.update(self.unit().as_bytes()).update(&self.end().to_le_bytes());
        for (_, contents) in self.files().iter().take(1) {
            hasher.update(contents);
        }
    }
}

impl Json {
    /// A tokenizer of the contents of `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse(json: &[u8], config: Option<&[u8]>, generation: Option<&[u8]>) -> std::result::Result<Json, String> {
        let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(json))?;
        if let ModelWrapper::BPE(model) = inner.get_model()
            && let Some(dropout) = model.dropout.filter(|&dropout| dropout != 0.0)
        {
            return Err(format!("model.dropout is {dropout}, so that a text has other ids each time: make it null"));
        }
        // A run has lengths of its own.
        inner.with_padding(None);
        guarded(|| inner.with_truncation(None).map(drop))?;
        let ids = guarded(|| Ok::<_, String>(inner.get_vocab(true).into_values().max()))?;
        let ids = ids.map_or(0, |largest| largest as usize + 1);
        let object = |name: &str, bytes: Option<&[u8]>| match bytes {
            Some(bytes) => serde_json::from_slice::<Value>(bytes).map_err(|e| format!("{name} beside it: {e}")),
            None => Ok(Value::Null),
        };
        let (config, generation) = (object(TOKENIZER_CONFIG, config)?, object(GENERATION_CONFIG, generation)?);
        // By name in one file, by id in the other.
        let named = |key: &str| {
            let value = config.get(key)?;
            let name = value.as_str().or_else(|| value.get("content")?.as_str())?;
            inner.token_to_id(name)
        };
        let numbered = |key: &str| -> Vec<u32> {
            let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
            match generation.get(key) {
                Some(Value::Array(all)) => all.iter().filter_map(id).collect(),
                Some(value) => id(value).into_iter().collect(),
                None => Vec::new(),
            }
        };
        let one = |name: &str, number: &str| named(name).or_else(|| numbered(number).first().copied());
        let end = one("eos_token", "eos_token_id").ok_or_else(|| {
            format!(
                "nothing says which token ends a text: eos_token of {TOKENIZER_CONFIG} and eos_token_id of \
                 {GENERATION_CONFIG} beside it, one of which must name a token that it has"
            )
        })?;
        let mut eos = numbered("eos_token_id");
        if !eos.contains(&end) {
            eos.insert(0, end);
        }
        let tokens =
            SpecialTokens { bos: one("bos_token", "bos_token_id"), eos, pad: one("pad_token", "pad_token_id") };
        let what = [("begins", tokens.bos), ("is padded", tokens.pad)].map(|(what, id)| id.map(|id| (what, id)));
        let all = tokens.eos.iter().map(|&id| ("ends", id)).chain(what.into_iter().flatten());
        if let Some((what, id)) = all.into_iter().find(|&(_, id)| id as usize >= ids) {
            return Err(format!("a text {what} with id {id}, but its ids are below {ids}"));
        }
        Ok(Json { inner, ids, end, tokens, files: Vec::new() })
    }
}

/// What a call of the library comes to. Its panics (a regular expression that gives up, a vocabulary that does not fit
/// itself) are an error of the file here.
fn guarded<T, E: ToString>(call: impl FnOnce() -> std::result::Result<T, E>) -> std::result::Result<T, String> {
    let message = |panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
        format!("the tokenizer cannot be used: {}", text.unwrap_or_default())
    };
    let one_line = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|e| one_line(e.to_string())),
        Err(panic) => Err(one_line(message(panic))),
    }
}

/// The ranges of a text's pieces of about `size` bytes.
pub(super) fn pieces(text: &[u8], size: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let count = text.len().div_ceil(size);
    (0..count).map(move |n| cut(text, n * size)..cut(text, (n + 1) * size)).filter(|piece| !piece.is_empty())
}

/// The end of the line that `near` is in, or if it is far, the next character. Depends on the text alone.
pub(super) fn cut(text: &[u8], near: usize) -> usize {
    if near == 0 || near >= text.len() {
        return near.min(text.len());
    }
    let reach = &text[near..text.len().min(near + REACH)];
    let line = reach.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
    // A byte of the form 10xxxxxx goes on with a character.
    let character = || reach.iter().position(|byte| byte & 0xc0 != 0x80).unwrap_or(reach.len());
    near + line.unwrap_or_else(character)
}

/// Ids to text, piece by piece, each of which is UTF-8: a character that takes several tokens comes with the last of
/// them.
#[derive(Debug)]
pub struct Decoder<'t> {
    tokenizer: &'t Tokenizer,
    ids: Vec<u32>,
    /// Ids from `context` on are decoded together; the text of those before `shown` is out.
    context: usize,
    shown: usize,
}

/// Tokens that are waited for when a character seems incomplete.
const INCOMPLETE: usize = 8;

impl<'t> Decoder<'t> {
    /// A text that goes on after these ids.
    pub fn new(tokenizer: &'t Tokenizer, before: &[u32]) -> Decoder<'t> {
        let kept = match tokenizer {
            // A byte is what it is, whatever stands before it.
            Tokenizer::Byte => &[],
            Tokenizer::Json(_) => &before[before.len().saturating_sub(INCOMPLETE)..],
        };
        Decoder { tokenizer, ids: kept.to_vec(), context: 0, shown: kept.len() }
    }

    /// The text that is complete with this id.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.rest()?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && self.ids.len() - self.shown < INCOMPLETE {
            return Ok(String::new());
        }
        match self.tokenizer {
            Tokenizer::Byte => self.context = self.ids.len(),
            Tokenizer::Json(_) if !text.is_empty() => self.context = self.shown,
            Tokenizer::Json(_) => return Ok(text),
        }
        self.shown = self.ids.len();
        Ok(text)
    }

    /// What is left when no id follows.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(self) -> Result<String> {
        self.rest()
    }

    fn rest(&self) -> Result<String> {
        let decode = |ids: &[u32]| self.tokenizer.decode(ids).map_err(Error::Data);
        let before = decode(&self.ids[self.context..self.shown])?;
        let text = decode(&self.ids[self.context..])?;
        // They may differ where a character was cut.
        let same = before.chars().zip(text.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
        let (_, new) = text.split_at(same);
        Ok(new.to_owned())
    }
}

/// What a run keeps of its tokenizer.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    /// Its special tokens.
    pub tokens: SpecialTokens,
    /// Its files, for the run's checkpoints.
    pub files: Vec<(&'static str, Vec<u8>)>,
}

/// The file of a run's tokenizer with its special tokens.
const KEPT_TOKENS: &str = "special_tokens.json";

impl Kept {
    /// The folder of a run's tokenizer in its directory.
    pub(crate) const FOLDER: &str = "tokenizer";

    /// Removes what [`write`](Kept::write) wrote there. What cannot be removed stays.
    pub(crate) fn remove(out: &Path) {
        let folder = out.join(Kept::FOLDER);
        for name in COPIED.into_iter().chain([KEPT_TOKENS]) {
            let _ = fs::remove_file(folder.join(name));
        }
        let _ = fs::remove_dir(folder);
    }

    /// Writes a tokenizer's files into a run's directory, from where its checkpoints have them. Bytes have none.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(tokenizer: &Tokenizer, out: &Path) -> Result<()> {
        let Some(tokens) = tokenizer.special_tokens() else { return Ok(()) };
        let folder = out.join(Kept::FOLDER);
        fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
        let tokens = serde_json::to_vec(tokens).unwrap_or_else(|e| unreachable!("plain data: {e}"));
        for (name, contents) in tokenizer.files().iter().chain([&(KEPT_TOKENS, tokens)]) {
            files::replace(&folder.join(name), contents)?;
        }
        Ok(())
    }

    /// What [`write`](Kept::write) wrote there; None if the run is one on bytes.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] and [`Error::Io`].
    pub fn read(out: &Path) -> Result<Option<Kept>> {
        let folder = out.join(Kept::FOLDER);
        if !folder.join(KEPT_TOKENS).exists() {
            return Ok(None);
        }
        let read = |name: &str| files::read(&folder.join(name), LARGEST);
        let tokens = serde_json::from_slice(&read(KEPT_TOKENS)?)
            .map_err(|e| Error::checkpoint(folder.join(KEPT_TOKENS), format!("is damaged: {e}")))?;
        let mut files = Vec::new();
        for name in COPIED.into_iter().filter(|name| folder.join(name).exists()) {
            files.push((name, read(name)?));
        }
        Ok(Some(Kept { tokens, files }))
    }
}
