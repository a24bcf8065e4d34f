//! Tensors by name in safetensors files: one file, or shards with an index, in the Hugging Face layout.
//!
//! The `safetensors` crate parses and writes the headers. Reading and writing the data is done here: a file is written
//! and hashed in one pass and synced, and read tensor by tensor into fresh memory, so that neither a file's size nor
//! its alignment matters. Nothing is allocated from a length that the file's size does not bear out.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use dropless_core::files;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;

use super::elements;
use super::open_file::OpenFile;
use crate::error::{Error, Result};
use crate::words::plain;

/// The longest header that a reader accepts, as in the `safetensors` crate.
const LONGEST_HEADER: u64 = 100_000_000;
/// The longest index: a line for each tensor.
const LONGEST_INDEX: u64 = 1 << 26;
/// Bytes that are read at once.
const BLOCK: usize = 1 << 24;
/// What the name of a selection bias ends with. It is f32 in every file, whatever the rest is: bf16 would merge biases
/// that differ by less than its spacing, and so change which experts are chosen.
pub(super) const SELECTION_BIAS: &str = "e_score_correction_bias";

/// A tensor as a file holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedTensor {
    /// Name, unique in a checkpoint.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Extents, slowest first.
    pub shape: Vec<usize>,
    /// Elements, little endian.
    pub bytes: Vec<u8>,
}

impl NamedTensor {
    /// An f32 tensor.
    pub fn f32(name: impl Into<String>, shape: &[usize], values: &[f32]) -> NamedTensor {
        let bytes = bytemuck::cast_slice(values).to_vec();
        NamedTensor { name: name.into(), dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }

    /// Whether no f32 element is infinite or NaN.
    pub fn is_finite(&self) -> bool {
        self.dtype != Dtype::F32 || self.floats().all(f32::is_finite)
    }

    /// The elements of an f32 tensor.
    fn floats(&self) -> impl Iterator<Item = f32> {
        self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }

    /// What a file's header says of it.
    pub fn head(&self) -> Head {
        Head { name: self.name.clone(), dtype: self.dtype, shape: self.shape.clone() }
    }

    /// Hash of element type, shape and elements.
    pub fn hash(&self) -> [u8; 32] {
        *self.head().hasher().update(&self.bytes).finalize().as_bytes()
    }
}

/// Size and hash of a written file.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FileRecord {
    /// Size.
    pub bytes: u64,
    /// Hash, in hex.
    pub blake3: String,
}

/// Writes a file, syncs it, and returns its record.
///
/// # Errors
/// [`Error::Io`], or [`Error::Checkpoint`] for tensors that such a file cannot hold.
pub fn write(path: &Path, tensors: &[NamedTensor]) -> Result<FileRecord> {
    let heads: Vec<Head> = tensors.iter().map(NamedTensor::head).collect();
    write_streamed(path, &heads, |at, out| out.write(&tensors[at].bytes))
}

/// What a file's header says of a tensor, but for its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Name, unique in a checkpoint.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Extents, slowest first.
    pub shape: Vec<usize>,
}

impl Head {
    /// Bytes of its elements; saturates, as no file has more.
    pub fn bytes(&self) -> usize {
        self.shape.iter().fold(self.dtype.bitsize(), |bits, &n| bits.saturating_mul(n)) / 8
    }

    /// The beginning of the tensor's [hash](NamedTensor::hash): its elements follow.
    pub fn hasher(&self) -> blake3::Hasher {
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{} {:?}\n", self.dtype, self.shape).as_bytes());
        hasher
    }
}

/// Writes a file of these tensors, each of which `produce` writes when its turn comes, in as many pieces as it likes;
/// syncs it, and returns its record.
///
/// # Errors
/// As [`write()`], those of `produce`, and [`Error::Checkpoint`] for a tensor that comes with another number of bytes.
pub fn write_streamed<E: From<Error>>(
    path: &Path,
    heads: &[Head],
    mut produce: impl FnMut(usize, &mut Writing<'_>) -> std::result::Result<(), E>,
) -> std::result::Result<FileRecord, E> {
    if let Some(bias) = heads.iter().find(|head| head.name.ends_with(SELECTION_BIAS) && head.dtype != Dtype::F32) {
        return Err(Error::checkpoint(path, format!("{} is {}, but must be F32", bias.name, bias.dtype)).into());
    }
    let mut end = 0;
    let infos = heads.iter().map(|head| {
        let data_offsets = (end, end + head.bytes());
        end = data_offsets.1;
        (head.name.clone(), TensorInfo { dtype: head.dtype, shape: head.shape.clone(), data_offsets })
    });
    let metadata = Metadata::new(Some([("format".into(), "pt".into())].into()), infos.collect())
        .map_err(|e| Error::checkpoint(path, format!("cannot be written: {e}")))?;
    let mut header = serde_json::to_vec(&metadata).map_err(|e| Error::checkpoint(path, e.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let file = BufWriter::new(files::create(path).map_err(Error::from)?);
    let mut out = Writing { path, file, hasher: blake3::Hasher::new(), bytes: 0 };
    out.write(&(header.len() as u64).to_le_bytes())?;
    out.write(&header)?;
    for (at, head) in heads.iter().enumerate() {
        let before = out.bytes;
        produce(at, &mut out)?;
        let (found, expected) = (out.bytes - before, head.bytes() as u64);
        if found != expected {
            let what = format!("{} came with {found} bytes, expected {expected}", head.name);
            return Err(Error::checkpoint(path, what).into());
        }
    }
    let file = out.file.into_inner().map_err(|e| Error::io(path)(e.into_error()))?;
    file.sync_all().map_err(Error::io(path))?;
    Ok(FileRecord { bytes: out.bytes, blake3: out.hasher.finalize().to_hex().to_string() })
}

/// A file that is being written, and hashed in the same pass.
#[derive(Debug)]
pub struct Writing<'a> {
    path: &'a Path,
    file: BufWriter<File>,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl Writing<'_> {
    /// Adds bytes of the tensor whose turn it is.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(Error::io(self.path))
    }
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
struct Place {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    from: u64,
    bytes: usize,
}

/// What is known of a tensor without reading it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found<'a> {
    pub(super) dtype: Dtype,
    pub(super) shape: &'a [usize],
    /// Its place among the files.
    pub(super) file: usize,
    pub(super) bytes: usize,
}

/// Named tensors in one or several files.
///
/// The files stay open, so that all of it can be read even when somebody removes them.
#[derive(Clone, Debug)]
pub struct TensorFiles {
    files: Vec<Arc<OpenFile>>,
    places: BTreeMap<String, Place>,
}

/// `*.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl TensorFiles {
    /// The tensors of `STEM.safetensors` in `dir`, or of the shards that `STEM.safetensors.index.json` names.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] or [`Error::Io`], naming the file.
    pub fn open(dir: &Path, stem: &str) -> Result<TensorFiles> {
        let index = dir.join(format!("{stem}.safetensors.index.json"));
        let single = dir.join(format!("{stem}.safetensors"));
        if single.exists() || !index.exists() {
            return TensorFiles::open_files(vec![single]);
        }
        let text = files::read(&index, LONGEST_INDEX)?;
        let map = serde_json::from_slice::<Index>(&text)
            .map_err(|e| Error::checkpoint(&index, plain(&e.to_string())))?
            .weight_map;
        if map.is_empty() {
            return Err(Error::checkpoint(&index, "names no tensor"));
        }
        let mut names: Vec<&String> = map.values().collect();
        names.sort();
        names.dedup();
        let plain =
            |name: &&String| matches!(Path::new(name).components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
        if let Some(name) = names.iter().find(|name| !plain(name)) {
            return Err(Error::checkpoint(&index, format!("names the file {name:?}, expected one beside it")));
        }
        let tensors = TensorFiles::open_files(names.into_iter().map(|name| dir.join(name)).collect())?;
        for (tensor, file) in &map {
            if tensors.places.get(tensor).is_none_or(|place| tensors.path(place.file) != dir.join(file)) {
                return Err(Error::checkpoint(&index, format!("{tensor} is not in {file}, where the index has it")));
            }
        }
        Ok(tensors)
    }

    /// The tensors of these files.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] or [`Error::Io`], naming the file; a tensor that is in two files is an error too.
    pub fn open_files(files: Vec<PathBuf>) -> Result<TensorFiles> {
        let open = |path: PathBuf| OpenFile::open(&path).map(Arc::new);
        TensorFiles::of(files.into_iter().map(open).collect::<Result<_>>()?)
    }

    /// The tensors of files that are open, of which there is at least one.
    ///
    /// # Errors
    /// As [`open_files`](TensorFiles::open_files).
    pub fn of(files: Vec<Arc<OpenFile>>) -> Result<TensorFiles> {
        let mut places: BTreeMap<String, Place> = BTreeMap::new();
        for (at, file) in files.iter().enumerate() {
            let (header, metadata) = read_header(file)?;
            for (name, info) in metadata.tensors() {
                let (from, to) = info.data_offsets;
                let (dtype, shape) = (info.dtype, info.shape.clone());
                let place = Place { file: at, dtype, shape, from: header + from as u64, bytes: to - from };
                if let Some(first) = places.insert(name.clone(), place) {
                    let first = files[first.file].path().display();
                    return Err(Error::checkpoint(file.path(), format!("{name} is also in {first}")));
                }
            }
        }
        Ok(TensorFiles { files, places })
    }

    /// All names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// Element type, shape and file of a tensor; None if it is not there.
    pub(super) fn find(&self, name: &str) -> Option<Found<'_>> {
        let place = self.places.get(name)?;
        Some(Found { dtype: place.dtype, shape: &place.shape, file: place.file, bytes: place.bytes })
    }

    /// Number of files.
    pub(super) fn count(&self) -> usize {
        self.files.len()
    }

    fn path(&self, file: usize) -> &Path {
        self.files[file].path()
    }

    /// The file, or the directory of several.
    pub(super) fn whole(&self) -> &Path {
        let first = self.path(0);
        if self.files.len() == 1 { first } else { first.parent().unwrap_or(first) }
    }

    /// " in FILE" where there are several files, for a list of tensors of all of them.
    pub(super) fn of_several(&self, file: usize) -> String {
        let name = self.path(file).file_name().unwrap_or_default().to_string_lossy();
        if self.files.len() == 1 { String::new() } else { format!(" in {name}") }
    }

    fn place(&self, name: &str) -> Result<&Place> {
        let missing = || Error::checkpoint(self.whole(), format!("there is no tensor {name}"));
        self.places.get(name).ok_or_else(missing)
    }

    /// An error about a tensor that is there.
    pub(super) fn bad(&self, name: &str, what: impl std::fmt::Display) -> Error {
        let path = self.places.get(name).map_or(self.whole(), |place| self.path(place.file));
        Error::checkpoint(path, format!("{name} {what}"))
    }

    /// Bytes of a tensor, from the `from`th on.
    pub(super) fn read(&self, name: &str, from: usize, bytes: usize) -> Result<Vec<u8>> {
        let place = self.place(name)?;
        if from.checked_add(bytes).is_none_or(|to| to > place.bytes) {
            return Err(self.bad(name, format!("has {} bytes, but {bytes} from {from} on are needed", place.bytes)));
        }
        let file = &self.files[place.file];
        let mut buffer = files::buffer(file.path(), bytes as u64)?;
        file.read_at(place.from + from as u64, &mut buffer)?;
        Ok(buffer)
    }

    /// A tensor as it is in its file.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when it is not there, [`Error::Io`] when it cannot be read.
    pub fn get(&self, name: &str) -> Result<NamedTensor> {
        let place = self.place(name)?;
        let bytes = self.read(name, 0, place.bytes)?;
        Ok(NamedTensor { name: name.to_owned(), dtype: place.dtype, shape: place.shape.clone(), bytes })
    }

    /// A tensor's values: f32, or bf16 and f16 exactly. Those of FP8 weights are in [`WeightFiles`](super::WeightFiles).
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the tensor: not there, another shape, a type that holds no such values.
    pub fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let Place { file, dtype, shape: found, bytes, .. } = self.place(name)?;
        if found != shape {
            return Err(self.bad(name, format!("has the shape {found:?}, expected {shape:?}")));
        }
        if !elements::FLOATS.contains(dtype) {
            return Err(self.bad(name, format!("is {dtype}, expected F32, BF16 or F16")));
        }
        let mut values = files::room(self.path(*file), (bytes / elements::size(*dtype)) as u64)?;
        // Block by block, so that the tensor is in memory once.
        for from in (0..*bytes).step_by(BLOCK) {
            elements::append(*dtype, &self.read(name, from, BLOCK.min(bytes - from))?, &mut values);
        }
        Ok(values)
    }

    /// A tensor's shape.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when it is not there.
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.place(name)?.shape)
    }

    /// A tensor of ids: I64, I32 or U32, each in the range of u32.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the tensor: not there, another type, an id out of range.
    pub fn ids(&self, name: &str) -> Result<Vec<u32>> {
        let Place { file, dtype, bytes, .. } = self.place(name)?;
        let wide: fn(&[u8]) -> i64 = match dtype {
            Dtype::I64 => |b| i64::from_le_bytes(std::array::from_fn(|i| b[i])),
            Dtype::I32 => |b| i32::from_le_bytes(std::array::from_fn(|i| b[i])).into(),
            Dtype::U32 => |b| u32::from_le_bytes(std::array::from_fn(|i| b[i])).into(),
            other => return Err(self.bad(name, format!("is {other}, expected I64, I32 or U32"))),
        };
        let size = elements::size(*dtype);
        let mut ids = files::room(self.path(*file), (bytes / size) as u64)?;
        for id in self.read(name, 0, *bytes)?.chunks_exact(size).map(wide) {
            ids.push(u32::try_from(id).map_err(|_| self.bad(name, format!("has the id {id}")))?);
        }
        Ok(ids)
    }
}

/// Where the data begins, and the header, checked against the size of the file.
fn read_header(file: &OpenFile) -> Result<(u64, Metadata)> {
    let (path, size) = (file.path(), file.bytes());
    let bad = |what: String| Error::checkpoint(path, what);
    if size < 8 {
        return Err(bad(format!("is damaged: it has {size} bytes, but a safetensors file has at least 8")));
    }
    let mut length = [0; 8];
    file.read_at(0, &mut length)?;
    let length = u64::from_le_bytes(length);
    if length > size - 8 {
        return Err(bad(format!("is damaged: its header claims {length} bytes, but the file has {size} in all")));
    }
    if length > LONGEST_HEADER {
        return Err(bad(format!("has a header of {length} bytes, expected at most {LONGEST_HEADER}")));
    }
    let mut json = files::buffer(path, length)?;
    file.read_at(8, &mut json)?;
    let metadata: Metadata = serde_json::from_slice(&json).map_err(|e| bad(unsupported(&json, &e)))?;
    let (from, expected) = (8 + length, 8 + length + metadata.data_len() as u64);
    if size != expected {
        return Err(bad(format!("is damaged: it has {size} bytes, but its header describes {expected}")));
    }
    Ok((from, metadata))
}

/// Why a header does not parse: the first tensor of an unknown type, or else the parser's words.
fn unsupported(json: &[u8], error: &serde_json::Error) -> String {
    let tensors = serde_json::from_slice::<BTreeMap<String, serde_json::Value>>(json).unwrap_or_default();
    let unknown = tensors.iter().find_map(|(name, info)| {
        let dtype = info.get("dtype")?;
        let known = serde_json::from_value::<Dtype>(dtype.clone()).is_ok();
        if known { None } else { Some(format!("{name} has the unsupported type {dtype}")) }
    });
    unknown.unwrap_or_else(|| format!("is damaged: its header cannot be read: {}", plain(&error.to_string())))
}
