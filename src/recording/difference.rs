//! The first place where two values of one type differ, found through their JSON form.

use serde::Serialize;
use serde_json::Value;

/// Where a replay left the recording.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    pub step: u64,
    /// The path of the field, such as `plan.rows[2].num_tokens`.
    pub field: String,
    pub recorded: Value,
    pub replayed: Value,
}

/// The first field in which `replayed` differs, below `name`.
pub fn first<T: Serialize + PartialEq>(step: u64, name: &str, recorded: &T, replayed: &T) -> Option<Difference> {
    if recorded == replayed {
        return None;
    }
    let value = |of: &T| serde_json::to_value(of).unwrap_or(Value::Null);
    let (field, recorded, replayed) = walk(name.to_string(), value(recorded), value(replayed)).unwrap_or((
        name.to_string(),
        Value::Null,
        Value::Null,
    ));
    Some(Difference { step, field, recorded, replayed })
}

fn walk(path: String, recorded: Value, replayed: Value) -> Option<(String, Value, Value)> {
    match (recorded, replayed) {
        (Value::Object(mut a), Value::Object(mut b)) => {
            let keys: Vec<String> = a.keys().chain(b.keys()).cloned().collect();
            let mut take = |key: &str| (a.remove(key).unwrap_or_default(), b.remove(key).unwrap_or_default());
            keys.into_iter().find_map(|key| {
                let (a, b) = take(&key);
                walk(format!("{path}.{key}"), a, b)
            })
        }
        (Value::Array(mut a), Value::Array(mut b)) => {
            let len = a.len().max(b.len());
            a.resize(len, Value::Null);
            b.resize(len, Value::Null);
            a.into_iter().zip(b).enumerate().find_map(|(i, (a, b))| walk(format!("{path}[{i}]"), a, b))
        }
        (a, b) => (a != b).then_some((path, a, b)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn first_difference_is_named_by_path() {
        let a = json!({ "rows": [{ "from": 0, "len": 3 }, { "from": 3, "len": 1 }], "budget": 9 });
        let b = json!({ "rows": [{ "from": 0, "len": 3 }, { "from": 3, "len": 2 }], "budget": 8 });
        let found = first(7, "plan", &a, &b).expect("they differ");
        assert_eq!((found.step, found.field.as_str()), (7, "plan.rows[1].len"));
        assert_eq!((found.recorded, found.replayed), (json!(1), json!(2)));
        assert_eq!(first(7, "plan", &a, &a), None);
        let longer = first(1, "x", &json!([1]), &json!([1, 2])).expect("one is longer");
        assert_eq!((longer.field.as_str(), longer.recorded, longer.replayed), ("x[1]", Value::Null, json!(2)));
    }
}
