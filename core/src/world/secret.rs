//! What the processes of a job know and nobody else: they prove it to each other before they talk (docs/protocol.md).

use std::fmt;
use std::io::Read;
use std::path::Path;

use super::refused;
use crate::error::Result;
use crate::files::{self, FileError};

/// The variable with the secret of a job.
pub const SECRET: &str = "DROPLESS_SECRET";
/// The variable that names a file with it.
pub const SECRET_FILE: &str = "DROPLESS_SECRET_FILE";

/// Bytes of a secret: fewer can be guessed, and more are no secret but another file.
const BYTES: std::ops::RangeInclusive<usize> = 16..=4096;

/// The secret of a job.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Box<[u8]>);

impl Secret {
    /// A secret of these bytes, without the white space around them.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] unless they are 16 to 4096.
    pub fn new(bytes: &[u8]) -> Result<Secret> {
        Secret::of(SECRET, bytes)
    }

    fn of(name: &'static str, bytes: &[u8]) -> Result<Secret> {
        let bytes = bytes.trim_ascii();
        if !BYTES.contains(&bytes.len()) {
            let expected = format!("{} to {} that nobody can guess", BYTES.start(), BYTES.end());
            return Err(refused(name, format!("{} bytes", bytes.len()), expected));
        }
        Ok(Secret(bytes.into()))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// What the variables say.
    pub(super) fn find(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Secret>> {
        match (variable(SECRET), variable(SECRET_FILE)) {
            (None, None) => Ok(None),
            (Some(_), Some(_)) => Err(refused(SECRET_FILE, "set".into(), format!("not set, as {SECRET} is"))),
            (Some(text), None) => Secret::new(text.as_bytes()).map(Some),
            (None, Some(path)) => match read(&path) {
                Ok(bytes) => Secret::of(SECRET_FILE, &bytes).map(Some),
                Err(error) => Err(refused(SECRET_FILE, error.to_string(), "a file that can be read".into())),
            },
        }
    }
}

/// The file, or as much of it as shows that it is too long.
fn read(path: &str) -> std::result::Result<Vec<u8>, FileError> {
    let path = Path::new(path);
    let (file, _) = files::open(path)?;
    let (mut bytes, limit) = (Vec::new(), 2 * *BYTES.end() as u64);
    match file.take(limit).read_to_end(&mut bytes) {
        Ok(_) => Ok(bytes),
        Err(source) => Err(FileError::Io { path: path.to_owned(), source }),
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(variables: &[(&str, &str)]) -> std::result::Result<Option<Secret>, String> {
        let variable = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        Secret::find(&variable).map_err(|error| error.to_string())
    }

    const LONG: &str = "0123456789abcdef";

    #[test]
    fn f20_a_secret_comes_from_a_variable_or_a_file() {
        assert_eq!(find(&[]), Ok(None));
        assert_eq!(find(&[(SECRET, LONG)]).unwrap().unwrap().bytes(), LONG.as_bytes());
        let path = std::env::temp_dir().join(format!("dropless-secret-{}", std::process::id()));
        std::fs::write(&path, format!(" {LONG}\n")).unwrap();
        let name = path.to_str().unwrap();
        assert_eq!(find(&[(SECRET_FILE, name)]), find(&[(SECRET, LONG)]));
        let both = find(&[(SECRET_FILE, name), (SECRET, LONG)]);
        assert_eq!(
            both.unwrap_err(),
            "environment: DROPLESS_SECRET_FILE is set, expected not set, as DROPLESS_SECRET is"
        );
        std::fs::write(&path, vec![b'x'; 1 << 20]).unwrap();
        assert!(find(&[(SECRET_FILE, name)]).unwrap_err().contains("expected 16 to 4096"));
        std::fs::remove_file(&path).unwrap();
        assert!(find(&[(SECRET_FILE, name)]).unwrap_err().contains("expected a file that can be read"));
    }

    #[test]
    fn f20_a_secret_is_long_enough_and_never_printed() {
        let short = find(&[(SECRET, &LONG[1..])]).unwrap_err();
        assert_eq!(short, "environment: DROPLESS_SECRET is 15 bytes, expected 16 to 4096 that nobody can guess");
        assert_eq!(format!("{:?}", find(&[(SECRET, LONG)]).unwrap().unwrap()), "Secret(..)");
    }
}
