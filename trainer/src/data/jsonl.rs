//! One line of JSON, of which one field is a document.

use std::borrow::Cow;
use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

/// The text in `field` of the JSON object that a line is. Other fields are skipped without being kept.
///
/// # Errors
/// What is wrong with the line.
pub fn text<'a>(line: &'a [u8], field: &str) -> Result<Cow<'a, str>, String> {
    let mut json = serde_json::Deserializer::from_slice(line);
    let text = Line { field }.deserialize(&mut json).and_then(|text| json.end().map(|()| text));
    text.map_err(|error| {
        // The parser counts the lines of what it was given, which is one.
        let message = error.to_string();
        let place = format!(" at line {} column {}", error.line(), error.column());
        message
            .strip_suffix(&place)
            .map_or_else(|| message.clone(), |what| format!("{what} (column {})", error.column()))
    })
}

struct Line<'f> {
    field: &'f str,
}

/// A string, borrowed from the line where nothing in it is escaped.
struct Text;

impl<'de> DeserializeSeed<'de> for Line<'_> {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Cow<'de, str>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Line<'_> {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with a field {:?}", self.field)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Cow<'de, str>, A::Error> {
        let mut text = None;
        while let Some(key) = map.next_key_seed(Text)? {
            if key != self.field {
                map.next_value::<IgnoredAny>()?;
            } else if text.replace(map.next_value_seed(Text)?).is_some() {
                return Err(de::Error::custom(format_args!("field {:?} is there twice", self.field)));
            }
        }
        text.ok_or_else(|| de::Error::custom(format_args!("there is no field {:?}", self.field)))
    }
}

impl<'de> DeserializeSeed<'de> for Text {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Cow<'de, str>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Text {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E>(self, text: &str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Owned(text.to_owned()))
    }
}
